"""Tiny models with members that disagree, and files of rows to evaluate them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hf_bayes.cli.evaluation.case import Case, Found, Target, evaluate
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from tests.tiny_models import TEXTS, tiny_tokenizer

NUM_ROWS = 7
SENTENCES = [f"{TEXTS[i % 4][: 9 + i]} {i}" for i in range(NUM_ROWS)]


def members_of(model: Any, **options: Any) -> BayesianModel:
    """Return the model with three members."""
    bayesian = attach(model, subspace="last_block", num_members=3, **options)
    bayesian.theta.data += 0.3 * torch.randn(bayesian.theta.shape, generator=torch.Generator().manual_seed(0))
    return bayesian


def write_rows(folder: Path, labels: list[Any], **columns: list[Any]) -> dict[str, str]:
    """Write the files "test", and "other" without labels; ``columns`` stand in place of the texts."""
    columns = columns or {"text": SENTENCES}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    labelled = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    (folder / "other.jsonl").write_text("\n".join(map(json.dumps, rows[:5])))
    return {name: str(folder / f"{name}.jsonl") for name in ("test", "other")}


def found_by(
    case: Case, model: BayesianModel, files: dict[str, str], names: list[str], *, batch_size: int = 3, **arguments: Any
) -> Found:
    """Return the statistics of the sets."""
    args, tokenizer = case.arguments(**arguments), tiny_tokenizer()
    sets = case.read(files, tokenizer, Target({"labels": names}, None), args)
    return evaluate(model, sets, case, case.collate(tokenizer, sets, args), batch_size=batch_size)


def inputs_of(text: str) -> dict[str, Any]:
    """Return the inputs of one text alone."""
    encoded = tiny_tokenizer()(text, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
