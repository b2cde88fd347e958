"""The settings of a run on a model without a learning rate: the method's own, and a rate of AdamW from a trial.

``chains.own_settings`` lists the steps; ``chains.energy_settings`` has the same for ``sample``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hf_bayes.chains.own_settings import choose_settings, with_stated_warm_start
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import burn_in_steps
from hf_bayes.objectives.range_test import RangeTest

TryRates = Callable[[int], RangeTest]
"""updates of AdamW in the run -> the result of a trial."""


class Settings(NamedTuple):
    """The settings that a run is made with.

    Attributes:
        method: the config, with numbers in place of settings that were left open.
        learning_rate: the peak of the learning rate. None if the method finds a step size of its own during the run;
            every update then has learning rate 1.
        found_rate: the learning rate of AdamW that a trial has found, in this call or before the run was resumed; None
            without a trial.
        trial: the result of the trial of this call.
    """

    method: MethodConfig
    learning_rate: float | None
    found_rate: float | None = None
    trial: RangeTest | None = None


def settle_model(
    method: MethodConfig,
    learning_rate: float | None,
    num_steps: int,
    trial: TryRates | None,
    found: float | None = None,
    *,
    falls: bool = True,
) -> Settings:
    """Return the settings of a run of ``num_steps`` updates.

    Args:
        method: the config as the user gave it.
        learning_rate: the peak as the user gave it; None leaves it to the method.
        trial: a function that tries learning rates of AdamW; None if that is not possible here.
        found: the rate that an earlier trial of the same run has found, for a run that resumes.
        falls: the learning rate of an optimiser falls linearly to 0; False leaves that to the caller.
    Raises:
        ValueError: if the method needs a learning rate, or a trial that is not possible here.
    """
    burn_in = burn_in_steps(method.burn_in, num_steps)
    if learning_rate is not None:
        return Settings(with_stated_warm_start(method, burn_in), learning_rate)
    chosen = choose_settings(method, num_steps, burn_in=burn_in, falls=falls)
    if not chosen.adamw_steps:
        return Settings(chosen.method, chosen.learning_rate)
    result = None
    if found is None:
        result = _require_trial(trial, method)(chosen.adamw_steps)
        found = result.learning_rate
    chosen = chosen.with_found(found)
    return Settings(chosen.method, chosen.learning_rate, found, result)


def _require_trial(trial: TryRates | None, method: MethodConfig) -> TryRates:
    if trial is None:
        whitens = method.requirements.learning_rate == "whitening"
        raise ValueError(
            f"{method.name} without a learning rate tries several rates of AdamW on training batches first, and there "
            "are none here: give trial_updates, or a learning rate"
            + (" of the warm start (warm_start_learning_rate)" if whitens else "")
        )
    return trial
