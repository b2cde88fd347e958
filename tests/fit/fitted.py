"""A linear regression whose Laplace approximation is exact, and a short call of ``fit_laplace``."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, fit_laplace
from hf_bayes.posteriors.posterior import Posterior
from tests.runs import label_rows
from tests.tiny_models import tiny_bert

NOISE = 0.5

STD = 2.0


def regression(rows: int = 12) -> tuple[Any, list[dict[str, Any]], Tensor, Tensor]:
    """A frozen encoder with a linear head of 5 parameters at its exact MAP; data, features [n, 5], labels [n]."""
    model = tiny_bert(dtype=torch.float64, num_labels=1, hidden_size=4)
    data = label_rows(rows)
    features: list[Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    for row in data:
        # as labels arrive: collators make float32 of them
        row["label"] = float(torch.tensor(math.sin(sum(row["input_ids"])), dtype=torch.float32))
        model(input_ids=torch.tensor([row["input_ids"]]))
    handle.remove()
    phi = torch.cat([torch.cat(features).detach(), torch.ones(rows, 1, dtype=torch.float64)], 1)
    y = torch.tensor([row["label"] for row in data], dtype=torch.float64)
    best = torch.linalg.solve(phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2, phi.T @ y / NOISE**2)
    model.classifier.weight.data, model.classifier.bias.data = best[None, :4].clone(), best[4:].clone()
    return model, data, phi, y


def fit(model: Any, data: Any, **changes: Any) -> Posterior:
    names = (
        "subspace",
        "collate",
        "noise_std",
        "num_data",
        "data_unit",
        "batch_size",
        "heldout",
        "seed",
    )
    options = {name: changes.pop(name) for name in names if name in changes}
    return fit_laplace(model, data, LaplaceConfig(**changes), **options)


LAST = {"subspace": "last_layer", "noise_std": NOISE, "prior_std": STD}


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "keeps the diagonal" in str(one.message)]
