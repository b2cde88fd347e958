"""The base model of the quickstart: a tokenizer and a small Llama, trained from random weights on one corpus.

This module is not a command: ``python scripts/quickstart.py`` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_bayes.cli.progress import one_bar
from hf_bayes.cli.token_windows import token_windows


def train_tokenizer(texts: Sequence[str], *, vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. It can encode any text, also other kinds of text than the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>", model_max_length=512
    )


def windows(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, *, length: int, limit: int | None = None
) -> Dataset:
    """Return at most ``limit`` windows of exactly ``length`` tokens, without overlap, evenly spread over the texts."""
    rows = token_windows(Dataset.from_dict({"text": list(texts)}), tokenizer, length=length, join=True)
    # The last window overlaps the one before it.
    rows = rows.select(range(max(1, len(rows) - 1)))
    return rows if limit is None or limit >= len(rows) else rows.select([i * len(rows) // limit for i in range(limit)])


def pretrain_base(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    directory: str | Path,
    *,
    length: int = 128,
    epochs: float = 1.25,
    batch_size: int = 4,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> dict[str, float]:
    """Train a Llama of 1.7 million parameters with the stock Trainer, and save it and the tokenizer to ``directory``.

    Returns:
        The final loss in nats per token, tokens seen, seconds, tokens per second, and number of parameters.
    """
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,  # 0.02 suits widths of thousands. Here it costs half a nat after so few updates
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    rows = windows(texts, tokenizer, length=length)
    steps = round(epochs * (len(rows) // batch_size))
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        dataloader_drop_last=True,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=max(1, steps // 10),
        disable_tqdm=False,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
    one_bar(trainer)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    tokens = steps * batch_size * length
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return {
        "loss": float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "parameters": model.num_parameters(),
    }
