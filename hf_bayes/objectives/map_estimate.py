"""A MAP estimate: the point estimate with which a posterior is compared, or which shows the noise of labels."""

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
    title: str = "MAP estimate",
    progress: bool = False,
) -> Tensor:
    """Return the MAP estimate that an optimiser finds from ``theta``. Its step size falls linearly to 0.

    Args:
        rule: an optimiser.
        objective: an objective without dropout: a MAP estimate is defined without it.
        theta: [1, d] the start.
        problem: the problem that the rule was built for.
        updates: the batches of each update, at least ``num_updates`` of them.
        learning_rate: the step size of the first update.
        num_updates: the number of updates.
        title: the title of the progress bar.
        progress: show a progress bar.
    Returns:
        The estimate [1, d].
    Raises:
        FloatingPointError: if the optimiser diverges.
    """
    run = Run(rule, objective, theta, (), problem)
    steps = tqdm(range(num_updates), desc=title, disable=not progress, leave=False)
    for step, batches in zip(steps, updates, strict=False):
        run.update(batches, learning_rate * (1 - step / num_updates))
    return run.theta
