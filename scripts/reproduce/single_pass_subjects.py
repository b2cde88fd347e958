"""The models of ``single_pass``, their rows, and posteriors of four kinds.

The functions are no command.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    default_data_collator,
    set_seed,
)

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    LaplaceConfig,
    MeanFieldConfig,
    Posterior,
    SWAGConfig,
    fit_laplace,
)
from scripts.quickstart_base import pretrain_base, train_tokenizer, windows
from scripts.quickstart_corpora import corpora
from scripts.reproduce.encoder_table import encoder

MODULES = ("argparse", "collections", "decimal", "email.message", "logging", "tkinter")

LENGTH = 16
"""The number of tokens of a row of the classifier."""

Batch = dict[str, Tensor]


@dataclass
class Subject:
    """A function that trains a LoRA once, its training rows, and batches of other rows by set."""

    task: str
    base: Callable[[], Any]
    lora: Callable[[], Any]
    rows: list[dict[str, Any]]
    sets: dict[str, list[Batch]] = field(default_factory=dict)
    unlabelled: list[dict[str, Any]] = field(default_factory=list)
    """More rows for a student."""


def docstrings() -> tuple[list[str], list[int]]:
    """Return first paragraphs of docstrings of Python's library, and the number of the module of each."""
    found: dict[str, int] = {}
    for label, name in enumerate(MODULES):
        owners = [value for _, value in inspect.getmembers(importlib.import_module(name))]
        methods = [value for owner in owners if inspect.isclass(owner) for _, value in inspect.getmembers(owner)]
        own = [v for v in owners + methods if str(getattr(v, "__module__", "")).split(".")[0] == name.split(".")[0]]
        texts = sorted({" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()) for value in own})
        found |= dict.fromkeys([text for text in texts if len(text.split()) >= 4][:60], label)
    return list(found), list(found.values())


def classifier() -> Subject:
    """Train the classifier. Its held-out rows are docstrings; the other text is prose, and the same prose in rot13."""
    tokenizer = AutoTokenizer.from_pretrained(str(encoder()))

    def base() -> Any:
        set_seed(0)  # the head is new
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return AutoModelForSequenceClassification.from_pretrained(str(encoder()), num_labels=len(MODULES), **off)

    def encoded(texts: list[str]) -> list[dict[str, Any]]:
        found = tokenizer(texts, truncation=True, padding="max_length", max_length=LENGTH)
        pairs = zip(found["input_ids"], found["attention_mask"], strict=True)
        return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]

    texts, labels = docstrings()
    rows = [row | {"labels": label} for row, label in zip(encoded(texts), labels, strict=True)]
    prose = corpora()
    other = [line for name in ("test", "rot13") for line in "\n".join(prose[name]).splitlines() if len(line) > 40]
    sets = {"held out": rows[::2][:104], "other": encoded(other[:: max(1, len(other) // 104)][:104])}
    train = rows[1::2]
    targets = ["query", "value", "output.dense"]
    lora = functools.cache(lambda: adapted(base(), "SEQ_CLS", targets, [4, 5], train, steps=60))
    more = encoded([line for line in "\n".join(prose["pretrain"]).splitlines() if len(line) > 40][::50][:300])
    found = {k: batches(v, 26) for k, v in sets.items()}
    return Subject("sequence_classification", base, lora, train, found, unlabelled=more)


def language_model(directory: Path, blocks: Sequence[int] = (1, 2)) -> Subject:
    """Train the language model with LoRA in these blocks.

    Its held-out text is prose of the same kind as the training text; the other is code.
    """
    texts = corpora()
    tokenizer = train_tokenizer(texts["pretrain"])
    pretrain_base(texts["pretrain"], tokenizer, directory, length=64, epochs=0.15, batch_size=8)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory)

    def rows(name: str, limit: int) -> list[dict[str, Any]]:
        found = windows(texts[name], tokenizer, length=64, limit=limit)["input_ids"]
        return [{"input_ids": list(ids), "labels": list(ids)} for ids in found]

    train = rows("finetune", 120)
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = functools.cache(lambda: adapted(base(), "CAUSAL_LM", targets, list(blocks), train, steps=90))
    sets = {"held out": batches(rows("test", 8), 4), "other": batches(rows("code", 8), 4)}
    return Subject("causal_lm", base, lora, train, sets)


def adapted(base: Any, task: str, targets: list[str], blocks: list[int], rows: list[Any], *, steps: int) -> Any:
    """Return the model with a trained LoRA in these blocks."""
    set_seed(0)
    config = LoraConfig(
        task_type=task, r=8, lora_alpha=16, target_modules=targets, layers_to_transform=blocks, lora_dropout=0.0
    )
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))[:16].tolist()
        loss = model(**default_data_collator([rows[index] for index in chosen])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def posteriors(subject: Subject) -> dict[str, Callable[[], Posterior]]:
    """Return name -> function that makes a posterior. Those by training start anew from the same base."""

    def laplace(structure: str) -> Posterior:
        return fit_laplace(subject.lora(), subject.rows, LaplaceConfig(structure=structure, prior_std=0.05))

    def by_training(method: Any, steps: int) -> Posterior:
        config = subject.lora().peft_config["default"]
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=get_peft_model(subject.base(), dataclasses.replace(config, inference_mode=False)),
                method=method,
                args=BayesianTrainingArguments(
                    output_dir=directory, learning_rate=3e-3, max_steps=steps, per_device_train_batch_size=16,
                    map_updates=0, use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no",
                    save_strategy="no", trunk_memory_gib=1.0,
                ),
                train_dataset=Dataset.from_list(subject.rows),
                data_collator=default_data_collator,
            )  # fmt: skip
            trainer.train()
            return trainer.posterior

    prior = {"lora_": 0.1, "classifier": 1.0} if subject.task != "causal_lm" else {"lora_": 0.1}
    return {
        "diagonal Laplace": lambda: laplace("diagonal"),
        "K-FAC Laplace": lambda: laplace("kronecker"),
        "SWAG": lambda: by_training(SWAGConfig(num_chains=1, prior_std=prior), 200),
        "mean field": lambda: by_training(MeanFieldConfig(num_chains=1, num_draws=1, prior_std=prior), 200),
    }


def batches(rows: list[dict[str, Any]], size: int) -> list[Batch]:
    """Return rows as batches."""
    return [default_data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]


def without_labels(batch: Batch) -> Batch:
    """Return the inputs of a batch."""
    return {name: value for name, value in batch.items() if name != "labels"}


def unbatched(batches: list[Batch]) -> list[dict[str, Any]]:
    """Return the rows of batches."""
    return [
        {name: value[index] for name, value in batch.items()}
        for batch in batches
        for index in range(len(batch["labels"]))
    ]


def folder(directory: Path, label: str) -> Path:
    """Return the folder of a posterior in ``directory``."""
    return directory / label.replace(" ", "_").replace(",", "")


def kept(directory: Path | None, label: str, make: Callable[[], Posterior]) -> Posterior:
    """Return the posterior of an earlier call in ``directory``, or make it and keep it there."""
    if directory is None:
        return make()
    own = folder(directory, label)
    if not own.exists():
        make().save_pretrained(own)
    return Posterior.from_pretrained(own)
