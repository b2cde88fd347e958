"""The sequence classifier that Laplace fits are timed on. Needs torch, transformers and peft only."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, default_data_collator

from benchmarks.models import RANK

NUM_ROWS, LENGTH, BATCH, NUM_CLASSES = 32, 64, 8, 3
PRIOR_STD = 1.0
WORKS = {
    "last layer, diagonal": ("head", "diagonal"),
    "last layer, Kronecker": ("head", "kronecker"),
    "LoRA on all layers, diagonal": ("lora", "diagonal"),
}
"""What is timed: (where the random parameters are, structure)."""


def classifier(where: str) -> Any:
    """A BERT of 6 layers, in evaluation mode; what is random requires grad."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        num_labels=NUM_CLASSES, attn_implementation="eager",
    )  # fmt: skip
    model: Any = BertForSequenceClassification(config)
    if where == "lora":
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["query", "value"], init_lora_weights=False))
    else:
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
    return model.eval()


def rows() -> list[dict[str, Any]]:
    """Random tokens and classes, all of one length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 8192, (NUM_ROWS, LENGTH), generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(label)}
        for row, label in zip(ids, labels, strict=True)
    ]


def loader() -> DataLoader:
    """The rows in batches."""
    return DataLoader(rows(), batch_size=BATCH, collate_fn=default_data_collator)  # type: ignore[arg-type]
