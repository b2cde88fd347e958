"""A MAP estimate beside a posterior: what averaging over weights is judged against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.core.types import Evaluation, Rule
from hf_bayes.models.base import BayesianModel


def descend(
    model: BayesianModel,
    rule: Rule,
    theta: Tensor,
    updates: Iterable[list[dict[str, Any]]],
    *,
    scale: Callable[[Tensor], float | Tensor],
    learning_rate: float,
    num_updates: int,
    autocast: Callable[[], AbstractContextManager],
    total: Callable[[Tensor], Tensor],
    progress: bool = False,
) -> Tensor:
    """Follow an optimiser's rule from ``theta``, its step size falling to 0 in a straight line.

    Args:
        model: in evaluation mode: a MAP estimate knows no dropout.
        rule: of ``map``.
        theta: [1, d].
        updates: the micro-batches of each update, at least ``num_updates`` of them.
        scale: terms of an update [1] -> the factor that makes its log-likelihood that of all data.
        learning_rate: of the first update.
        num_updates: how many.
        autocast: what surrounds a forward.
        total: sums a tensor, in place, over processes that see other rows of an update.
        progress: show a bar.
    Returns:
        [1, d]
    """
    state, rngs = rule.init(theta, []), ()
    steps = tqdm(range(num_updates), desc="MAP estimate, for comparison", disable=not progress, leave=False)
    for step, batches in zip(steps, updates, strict=False):
        leaf = state.theta.detach().requires_grad_()
        log_lik, terms = torch.zeros(1, dtype=torch.float64, device=theta.device), torch.zeros(1, device=theta.device)
        gradient = torch.zeros_like(theta)
        for batch in batches:
            with autocast():
                output = model(**batch, theta=leaf, folded=False)
            gradient -= torch.autograd.grad(output.loss.sum(), leaf)[0]
            log_lik -= output.loss.detach()
            terms += output.num_terms
        for sums in (log_lik, gradient, terms):
            total(sums)
        factor = scale(terms)
        evaluation = Evaluation((factor * log_lik).to(theta.dtype), gradient * factor)
        state, _ = rule.update(state, evaluation, learning_rate * (1 - step / num_updates), rngs)
    return state.theta
