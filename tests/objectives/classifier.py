"""The objective of a tiny classifier, and its gradient by brute force."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.passes import member_passes
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from tests.tiny_models import batch, tiny_bert

CHAINS = 3


def classifier(likelihood: LikelihoodConfig | None = None, **options: Any) -> ModelObjective:
    model = attach(tiny_bert(), subspace="last_layer", num_members=CHAINS, likelihood=likelihood)
    scale = DataScale(100.0, num_rows=40, num_terms=40, rows_per_update=8)
    of_passes = {name: options.pop(name) for name in options.keys() & {"shared", "members_per_pass"}}
    return ModelObjective(member_passes(model, **of_passes), scale, **options)


def rows(seed: int, count: int = 4) -> dict[str, Tensor]:
    return {**batch(seed=seed, rows=count), "labels": torch.arange(count) % 2}


def theta_near(objective: ModelObjective) -> Tensor:
    theta = objective.model.theta.detach()
    return theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(0))


def brute_force(objective: ModelObjective, theta: Tensor, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sums of log-likelihoods [M] and their gradient [M, d], one member and one batch at a time."""
    values, grads = [], []
    for row in theta:
        leaf = row[None].clone().requires_grad_()
        total = sum(-objective.model(**one, theta=leaf, folded=False).loss.sum() for one in batches)
        (grad,) = torch.autograd.grad(total, leaf)
        values.append(total.detach())
        grads.append(grad[0])
    return torch.stack(values), torch.stack(grads)
