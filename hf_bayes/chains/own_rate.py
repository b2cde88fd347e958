"""The settings of runs without a learning rate, on a model and on an energy: the method's choices, and trials of rates.

A trial runs AdamW at several rates for n updates each; the rate falls linearly to 0. The best rate has the lowest mean
over the last third of its updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.registry import with_own_settings, with_stated_warm_start

MIN_UPDATES, MAX_UPDATES = 6, 40
"""The smallest and the largest number of updates at each rate of a trial. With fewer, rates differ by noise only."""


class ChosenSettings(NamedTuple):
    """The settings that a method chooses for a run without a learning rate.

    Attributes:
        method: the config, with numbers in place of settings that were left open.
        learning_rate: the peak. None if the method finds a step size of its own during the run, or a trial finds it.
        adamw_steps: the updates of AdamW in the run, whose rate is to be found by a trial; 0 if no trial is needed.
    """

    method: MethodConfig
    learning_rate: float | None
    adamw_steps: int = 0

    def with_found(self, rate: float) -> ChosenSettings:
        """Return the settings with the result of the trial: the rate of an optimiser, or of a sampler's warm start."""
        if self.method.requirements.learning_rate == "whitening":
            return ChosenSettings(replace(self.method, warm_start_learning_rate=rate), None)
        return ChosenSettings(self.method, rate)


def choose_settings(method: MethodConfig, num_steps: int, *, burn_in: int, falls: bool = True) -> ChosenSettings:
    """Return the settings of a run of ``num_steps`` updates without a learning rate.

    Args:
        method: as the user gave it.
        burn_in: the updates of burn-in, for a method that leaves them as they were given.
        falls: the learning rate of an optimiser falls linearly to 0; False leaves that to the caller.
    Raises:
        ValueError: if the method needs a learning rate, or its warm start is as long as the run.
    """
    method = with_own_settings(method, num_steps, falls=falls)
    kind = method.requirements.learning_rate
    if kind != "whitening":  # the warm start of such a sampler has a length by now
        method = with_stated_warm_start(method, burn_in)
    warm = method.num_warm_start_steps
    if warm >= num_steps:
        raise ValueError(
            f"{method.name}: {num_steps} updates with warm_start_steps={warm} leave none for the method: train longer, "
            "or lower warm_start_steps"
        )
    if kind == "unused":
        return ChosenSettings(method, 1.0)
    if kind == "from_length":
        return ChosenSettings(method, (num_steps - warm) ** -0.5)
    if kind == "range_test":
        return ChosenSettings(method, None, num_steps)
    return ChosenSettings(method, None, warm if method.warm_start_learning_rate is None else 0)


def last_third(values: Sequence[Tensor]) -> Tensor:
    """Return the values of the last third of the updates of a trial, stacked."""
    return torch.stack(list(values[-max(1, len(values) // 3) :]))


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss, by {rate: loss}; a loss that is not finite counts as the largest."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)
