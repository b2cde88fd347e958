"""Bayesian models that write text about images, and rows for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from tests import multimodal
from tests.members.reference import scattered
from tests.multimodal import IMAGE, illustrated

MAKE = {"llava": multimodal.llava, "gemma3": multimodal.gemma3, "qwen2_vl": multimodal.qwen2_vl}

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE]}


def bayesian(kind: str, num_members: int = 3, subspace: str = "last_block") -> BayesianModel:
    model = MAKE[kind](torch.float64)
    theta = scattered(model, select(model, subspace), num_members)
    return attach(model, theta, subspace=subspace).eval()


def rows_of(kind: str, count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    batch = illustrated(kind, count, seed)
    rows = [{name: value[row] for name, value in batch.items() if len(value) == count} for row in range(count)]
    if kind == "qwen2_vl":
        rows = [{**row, "pixel_values": batch["pixel_values"][4 * i : 4 * i + 4]} for i, row in enumerate(rows)]
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch as processors make it: the patches of all images follow each other."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    if "image_grid_thw" in batch:
        batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)}
