"""A MAP estimate beside a posterior: the point that averaging over weights is judged against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from tqdm import tqdm

from hf_bayes.chains.objective import Objective
from hf_bayes.chains.run import Run
from hf_bayes.core.types import Problem, Rule


def map_estimate(
    rule: Rule[Any],
    objective: Objective,
    theta: Tensor,
    problem: Problem,
    updates: Iterable[list[Any]],
    *,
    learning_rate: float,
    num_updates: int,
    progress: bool = False,
) -> Tensor:
    """Follow an optimiser's rule from ``theta``; its step size falls linearly to 0.

    Args:
        rule: of ``map``.
        objective: without dropout: a MAP estimate is defined without it.
        theta: [1, d].
        problem: what the rule was built for.
        updates: the batches of each update, at least ``num_updates`` of them.
        learning_rate: of the first update.
        num_updates: how many.
        progress: show a bar.
    Returns:
        [1, d]
    Raises:
        FloatingPointError: where the optimiser diverges.
    """
    run = Run(rule, objective, theta, (), problem)
    steps = tqdm(range(num_updates), desc="MAP estimate, for comparison", disable=not progress, leave=False)
    for step, batches in zip(steps, updates, strict=False):
        run.update(batches, learning_rate * (1 - step / num_updates))
    return run.theta
