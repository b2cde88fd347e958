"""The settings that a run chooses for itself if no learning rate was given. The steps, in order:

1. A trainer without a method chooses one (``training.setup.recommended_method``).
2. ``choose_settings`` adds the settings of the method: a schedule, the lengths of warm start and burn-in, and a rate if
   the method computes one from the length of the run. Its ``adamw_steps`` > 0 means: a rate of AdamW is still missing.
3. A trial finds this rate. AdamW runs at several rates for n updates each, and the rate falls linearly to 0. The best
   rate has the lowest mean over the last third of its updates (``last_third``, ``best_rate``). A model tries all rates
   at once (``objectives.range_test``), an energy tries one after the other (``energy_settings.try_rates``).
4. ``ChosenSettings.with_found`` stores the rate: it is the rate of an optimiser, or of a sampler's warm start.
5. After the warm start, a sampler finds its step size in whitened coordinates (``methods.sgmcmc.whitening``).
6. At the end, ``settled`` stores what the last pass over the data has found, such as a temperature.

Steps 2 to 4 are one function: ``objectives.model_settings.settle_model`` for a model, and
``energy_settings.settle_energy`` for ``sample``. Both get the trial as a function of the updates of AdamW. A
trainer reports the rate (``training.reports.own_choices``), and its checkpoints store it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Linear, burn_in_steps
from hf_bayes.core.types import FinalPassResult
from hf_bayes.methods.registry import names_with
from hf_bayes.methods.sgmcmc.whitening import num_measured

MAX_UPDATES = 40
"""The largest number of updates at each rate of a trial."""

WARM_STEPS = 240
"""The updates of AdamW before a sampler that finds its own step size. In a run below 480 updates they are half of it:
with less, chains start far from a mode, and noise does not bring them there. In one above 960 they are a quarter."""

SETTLING_SHARE = 0.15
"""The least share of a run between such a warm start and the first draw."""


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
        method: the config that the user gave.
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


def with_own_settings(config: MethodConfig, num_steps: int, *, falls: bool = True) -> MethodConfig:
    """Return the config of a run without a learning rate, with the settings that the method chooses for it.

    A sampler that whitens its coordinates begins with AdamW, for ``WARM_STEPS`` unless ``warm_start_steps`` says
    otherwise. The step size of an optimiser falls linearly to 0, unless it has a schedule, averages its iterates, or
    ``falls`` is False.

    Raises:
        ValueError: if the method needs a learning rate.
    """
    own = config.requirements.learning_rate
    if own == "whitening" and config.schedule is not None:
        raise ValueError(
            f"{config.name} with schedule={config.schedule.name!r} needs a learning_rate, the peak of the schedule, "
            "got None: give one, or leave the schedule out"
        )
    if own == "given":
        finds = ("whitening", "range_test", "from_length")
        finding = names_with(lambda needs: needs.learning_rate in finds)
        raise ValueError(
            f"{config.name} with these settings needs a learning_rate, got None: give one, or use a method that finds "
            f"one itself ({finding})"
        )
    if own in ("unused", "from_length"):
        return config
    if own == "range_test":
        falls = falls and config.requirements.rate_falls and config.schedule is None
        return replace(config, schedule=Linear()) if falls else config
    return _with_warm_start(config, num_steps)


def with_stated_warm_start(config: MethodConfig, burn_in: int) -> MethodConfig:
    """Return the config with the length of its warm start: one that has a rate and no length lasts for burn-in.

    Samplers without a learning rate choose another length (``with_own_settings``).

    Args:
        config: the config that the user gave.
        burn_in: the number of updates of burn-in.
    Raises:
        ValueError: if burn-in has no update.
    """
    if config.warm_start_learning_rate is None or config.warm_start_steps is not None:
        return config
    if burn_in == 0:
        raise ValueError(
            f"warm_start_learning_rate={config.warm_start_learning_rate} of {config.name} is for a warm start that "
            "lasts for burn-in, which has no updates here: give burn_in or warm_start_steps, or leave it out"
        )
    return replace(config, warm_start_steps=burn_in)


def _with_warm_start(config: MethodConfig, num_steps: int) -> MethodConfig:
    """Return the config of a sampler that whitens, with the lengths of warm start and burn-in."""
    warm, burn_in = config.warm_start_steps, config.burn_in
    if warm is None:
        warm = max(num_steps // 4, min(num_steps // 2, WARM_STEPS))
        if burn_in is not None:
            warm = min(warm, burn_in_steps(burn_in, num_steps) // 2)
    if burn_in is None:
        settling = max(int(SETTLING_SHARE * num_steps), num_measured(num_steps - warm) + 1)
        burn_in = max(num_steps // 2, warm + settling)
    return replace(config, warm_start_steps=warm, burn_in=burn_in)


def settled(method: MethodConfig, result: FinalPassResult) -> MethodConfig:
    """Return the config with what the run has found in place of what it began with."""
    return replace(method, **result.fields) if result.fields else method


def last_third(values: Sequence[Tensor]) -> Tensor:
    """Return the values of the last third of the updates of a trial, stacked."""
    return torch.stack(list(values[-max(1, len(values) // 3) :]))


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss, by {rate: loss}; a loss that is not finite counts as the largest."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)
