"""The settings of a run that has no learning rate: the method's own, and a rate for AdamW from a trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.registry import with_own_settings, with_stated_warm_start
from hf_bayes.objectives.range_test import RangeTest, TrialPlan, plan_trial

Trial = Callable[[TrialPlan, int], RangeTest]
"""(plan, updates of AdamW in the run) -> the result of a trial."""


class Settings(NamedTuple):
    """The settings that a run is made with.

    Attributes:
        method: the config, with numbers in place of settings that were left open.
        learning_rate: the peak. None if the method finds a step size of its own during the run; every update then has
            learning rate 1.
        trial: the result of a trial of learning rates; None without a trial.
    """

    method: MethodConfig
    learning_rate: float | None
    trial: RangeTest | None = None


def settle(
    method: MethodConfig,
    learning_rate: float | None,
    num_steps: int,
    trial: Trial | None,
    found: float | None = None,
    *,
    falls: bool = True,
) -> Settings:
    """Return the settings of a run of ``num_steps`` updates.

    Args:
        method: as the user gave it.
        learning_rate: as the user gave it; None leaves it to the method.
        trial: a function that tries learning rates of AdamW; None if that is not possible here.
        found: the rate that an earlier trial of the same run has found, for a run that resumes.
        falls: the learning rate of an optimiser falls linearly to 0; False leaves that to the caller.
    Raises:
        ValueError: if the method needs a learning rate, or a trial that is not possible here.
    """
    if learning_rate is not None:
        return Settings(with_stated_warm_start(method, num_steps), learning_rate)
    method = with_own_settings(method, num_steps, falls=falls)
    if method.requirements.learning_rate == "unused":
        return Settings(method, 1.0)
    if method.requirements.learning_rate == "from_length":
        return Settings(method, (num_steps - method.num_warm_start_steps) ** -0.5)
    whitens = method.requirements.learning_rate == "whitening"
    adamw_steps = method.num_warm_start_steps if whitens else num_steps
    if whitens and (adamw_steps == 0 or method.warm_start_learning_rate is not None):
        return Settings(method, None)
    if found is None and trial is None:
        raise ValueError(
            f"{method.name} without a learning rate tries several rates of AdamW on training batches first, and there "
            "are none here: give trial_updates, or a learning rate"
            + (" of the warm start (warm_start_learning_rate)" if whitens else "")
        )
    result = RangeTest(found, {}, 0) if found is not None else None
    if result is None:
        assert trial is not None
        gradients = math.ceil(num_steps * method.requirements.gradients_per_update)
        result = trial(plan_trial(gradients, method.num_chains), adamw_steps)
    if whitens:
        return Settings(replace(method, warm_start_learning_rate=result.learning_rate), None, result)
    return Settings(method, result.learning_rate, result)
