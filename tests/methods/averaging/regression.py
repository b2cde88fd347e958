"""Linear regression on minibatches with torch.optim.SGD, the reference for methods that run SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.rng import generator

N, DIM, CHAINS, RATE = 40, 5, 2, 0.05
INPUTS = torch.randn(N, DIM, generator=generator("x"), dtype=torch.float64)
TARGETS = torch.randn(N, generator=generator("y"), dtype=torch.float64)
START = torch.randn(CHAINS, DIM, generator=generator("theta"), dtype=torch.float64)
BATCHES = list(torch.randperm(N, generator=generator("batches")).split(8))


def energy(theta: Tensor, batch: Tensor) -> Tensor:
    """Return U of a regression with unit noise and a prior of standard deviation 0.7."""
    residual = TARGETS[batch] - theta @ INPUTS[batch].T
    return 0.5 * N / len(batch) * residual.square().sum(1) + 0.5 * theta.square().sum(1) / 0.7**2


def torch_sgd(num_steps: int, *, momentum: float, schedule: Callable[[Any], Any] | None = None) -> Tensor:
    """Return the iterates [num_steps, M, d] of torch.optim.SGD on U / N; ``schedule`` makes a scheduler of torch."""
    theta = START.clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], lr=RATE, momentum=momentum)
    scheduler = schedule(optimizer) if schedule else None
    path = []
    for step in range(num_steps):
        optimizer.zero_grad()
        (energy(theta, BATCHES[step % len(BATCHES)]).sum() / N).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        path.append(theta.detach().clone())
    return torch.stack(path)
