"""Tiny models built from a config, with seeded weights, and a tokenizer built in memory: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 320
PAD, BOS, EOS = 0, 1, 2

TEXTS = (
    "The mitochondrion is the powerhouse of the cell.",
    "Langevin dynamics samples from the Gibbs distribution of an energy.",
    "A chain that has not moved has not sampled anything.",
    "Uncertainty is total, aleatoric and epistemic, in nats.",
)


def tiny_tokenizer(texts: Sequence[str] = TEXTS, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``VOCABULARY`` tokens: pad 0, bos 1, eos 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=padding_side,
        model_max_length=64,
    )


def _build(make: Callable[[], PreTrainedModel], seed: int, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        # Standard deviation 0.02 leaves a tiny model almost linear, its logits almost equal: tests would see nothing.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """Two blocks, grouped-query attention."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return _build(lambda: LlamaForCausalLM(LlamaConfig(**(fields | config))), seed, dtype)


def tiny_gpt2(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> GPT2LMHeadModel:
    """Two blocks, Conv1D projections, head tied to the embedding, no dropout."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return _build(lambda: GPT2LMHeadModel(GPT2Config(**(fields | config))), seed, dtype)


def tiny_bert(
    seed: int = 0, dtype: torch.dtype = torch.float32, num_labels: int = 3, **config: Any
) -> BertForSequenceClassification:
    """Two blocks and a classifier, no dropout."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": PAD,
        "num_labels": num_labels,
    }
    return _build(lambda: BertForSequenceClassification(BertConfig(**(fields | config))), seed, dtype)


def tiny_vit(
    seed: int = 0, dtype: torch.dtype = torch.float32, num_labels: int = 3, **config: Any
) -> ViTForImageClassification:
    """Two blocks on four patches and a class token, no dropout."""
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": num_labels,
    }
    return _build(lambda: ViTForImageClassification(ViTConfig(**(fields | config))), seed, dtype)


CAUSAL_LMS: dict[str, Callable[..., PreTrainedModel]] = {"llama": tiny_llama, "gpt2": tiny_gpt2}

LORA_TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mistral": ["q_proj", "v_proj", "down_proj"],
    "qwen2": ["q_proj", "v_proj", "down_proj"],
    "gemma3_text": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "albert": ["query", "value"],
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
    "vit": ["q_proj", "v_proj"],
    "llava": ["q_proj", "v_proj"],
    "gemma3": ["q_proj", "v_proj"],
    "idefics3": ["q_proj", "v_proj"],
    "wav2vec2": ["q_proj", "v_proj"],
    "audio-spectrogram-transformer": ["q_proj", "v_proj"],
    "qwen2_vl": ["q_proj", "down_proj"],
}
HEADS = {
    "LMHeadModel": "CAUSAL_LM",
    "CausalLM": "CAUSAL_LM",
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
}
"""The end of a class's name -> peft's name of the task; it has none for images."""


def with_lora(model: PreTrainedModel, seed: int = 0, init_b: float = 0.3, **config: Any) -> PeftModel:
    """LoRA of rank 2 whose factor B is random, so that the adapter matters; ``init_b=0`` keeps peft's zeros.

    The adapter has the dtype of the model.
    """
    kind = model.config.model_type
    fields: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": LORA_TARGETS.get(kind),
        "task_type": next((task for head, task in HEADS.items() if type(model).__name__.endswith(head)), None),
        "fan_in_fan_out": kind == "gpt2",
    }
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**(fields | config))).to(dtype).eval()
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name and init_b:
                torch.nn.init.normal_(parameter, std=init_b)
    return adapted


def batch(rows: int = 3, length: int = 7, seed: int = 0, padding: str | None = None) -> dict[str, Tensor]:
    """Random ``input_ids``, ``attention_mask`` [rows, length]; row i is padded by i tokens on the side ``padding``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding is not None:
        position = torch.arange(length)
        for row in range(rows):
            padded = position < row if padding == "left" else position >= length - row
            mask[row, padded] = 0
        ids[mask == 0] = PAD
    return {"input_ids": ids, "attention_mask": mask}


def images(rows: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random ``pixel_values`` [rows, 3, 8, 8] for ``tiny_vit``."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn((rows, 3, 8, 8), generator=generator, dtype=torch.float64).to(dtype)}


def inputs_of(model: nn.Module, rows: int = 3, seed: int = 0, padding: str | None = None) -> dict[str, Tensor]:
    """Return the inputs of a model: a ``batch``, ``images``, both, or sounds."""
    from tests import multimodal

    core = model.get_base_model() if isinstance(model, PeftModel) else model
    if core.config.model_type in multimodal.MODEL_TYPES:
        return multimodal.inputs_of(core, rows, seed, padding)
    if core.main_input_name == "pixel_values":
        return images(rows, seed, next(core.parameters()).dtype)
    return batch(rows, seed=seed, padding=padding)


_NEW = hasattr(PreTrainedModel, "activation_checkpointing_enable")
CHECKPOINTING = "activation_checkpointing" if _NEW else "gradient_checkpointing"
"""The name of checkpointing in the installed transformers."""


def switch_on_checkpointing(model: nn.Module, *args: object) -> None:
    """``model.activation_checkpointing_enable``, by the name of the installed transformers."""
    getattr(model, f"{CHECKPOINTING}_enable")(*args)
