"""The sequence classifiers that Laplace fits are timed on. Needs torch, transformers and peft only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    default_data_collator,
)

from benchmarks.models import RANK, SHAPES

NUM_ROWS, LENGTH, BATCH = 32, 64, 8
VOCABULARY = 8192
PRIOR_STD = 1.0


def _llama() -> nn.Module:
    config = LlamaConfig(**SHAPES["30M"], max_position_embeddings=4096, pad_token_id=0, num_labels=4)
    return LlamaForSequenceClassification(config)


def _bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


@dataclass(frozen=True)
class Work:
    """A fit of the exact GGN.

    Attributes:
        family: of ``FAMILIES``.
        where: "head" or "lora", the random parameters.
        structure: "diagonal" or "kronecker".
    """

    family: str
    where: str
    structure: str


FAMILIES = {
    "Llama": (_llama, "score", ["q_proj", "v_proj"]),
    "BERT": (_bert, "classifier", ["query", "value"]),
}
"""Model, path of its head, and layers that LoRA is in: the 30M Llama of the other benchmarks, and a small encoder."""

WORKS = {
    f"{family}, {name}": Work(family, where, structure)
    for family in FAMILIES
    for name, where, structure in (
        ("last layer, diagonal", "head", "diagonal"),
        ("last layer, Kronecker", "head", "kronecker"),
        ("LoRA on all layers, diagonal", "lora", "diagonal"),
    )
}
"""The work that is timed."""


def classifier(work: Work) -> Any:
    """Return a classifier with random weights, in evaluation mode; random parameters require grad."""
    torch.manual_seed(0)
    build, head, targets = FAMILIES[work.family]
    model: Any = build()
    if work.where == "lora":
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False))
    else:
        model.requires_grad_(False)
        model.get_submodule(head).requires_grad_(True)
    return model.eval()


def rows(num_classes: int) -> list[dict[str, Any]]:
    """Random tokens and classes, all of one length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator)
    labels = torch.randint(num_classes, (NUM_ROWS,), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(label)}
        for row, label in zip(ids, labels, strict=True)
    ]


def loader(num_classes: int) -> DataLoader:
    """The rows in batches."""
    return DataLoader(rows(num_classes), batch_size=BATCH, collate_fn=default_data_collator)  # type: ignore[arg-type]
