"""Messages about the settings that a run chose by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_bayes.chains.run import StepRecord
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import FinalPassResult, Problem
from hf_bayes.objectives.model_settings import Settings
from hf_bayes.training.trainer_host import TrainerHost

MAX_DEPARTURE = 1.1
"""The held-out NLL of the draws over that of the chosen rung, above which a run warns."""

NOTABLE_GROWTH = 2.0
"""The growth of the variance of gradients above which a message is logged at the end of a run."""


def report_trial(settings: Settings, host: TrainerHost) -> None:
    """Say which learning rate was found, by this call or by the one that it resumes, and for what."""
    if settings.found_rate is None:
        return
    what = settings.method.name if settings.learning_rate is not None else "warm start by AdamW"
    if settings.trial is None:
        host.say("%s: learning rate %.2g, which was found when the run began", what, settings.found_rate)
    else:
        host.say("%s: %s", what, settings.trial.describe())


def report_ladder(name: str, result: FinalPassResult, host: TrainerHost, *, sampled: bool) -> None:
    """Say which rung of a ladder the held-out rows have chosen, and if a lower one was better later.

    Args:
        name: the name of the method.
        result: the result of its final pass.
        host: the trainer, which writes the message.
        sampled: False if the run was stopped before the first draw.
    """
    report = result.report
    if "ladder_nll" not in report:
        return
    rungs = list(zip(report["ladder_temperature"], report["ladder_prior_scale"], report["ladder_nll"], strict=True))
    scores = ", ".join(f"T = {t:g} and prior scale {s:g}: {nll:.4f}" for t, s, nll in rungs)
    host.say("%s: held-out nats of the ladder's rungs: %s", name, scores)
    if any(report["ladder_lost"]):
        host.say(
            "%s: %d of %d chains predicted badly at every T, and went back to the end of their warm start",
            name, sum(report["ladder_lost"]), len(report["ladder_lost"]),
        )  # fmt: skip
    first, temperature = report["ladder_drawn_at"][0], (result.fields or {})["temperature"]
    if first != temperature:
        host.say(
            "%s: T = %g was chosen, but the chains then moved to where they predict the held-out rows worse. They went "
            "back to where they were at the choice, at T = %g, and draws from before are left out",
            name,
            first,
            temperature,
        )
    words = "the posterior" if temperature == 1 else f"the posterior tempered at T = {temperature:g}, not the posterior"
    scale = (result.fields or {}).get("prior_scale", 1.0)
    if sampled:
        host.say("%s: the draws are of %s, under %g times the prior's standard deviations", name, words, scale)


def report_departure(name: str, report: Mapping[str, Any], nll: float, host: TrainerHost) -> None:
    """Warn if the draws predict the held-out rows much worse than their chains did when a ladder's rung was chosen.

    Args:
        name: the name of the method.
        report: the diagnostics of the run. A run that was stopped before its first draw has no draws to compare.
        nll: the mean NLL of a held-out term under the draws, in nats.
        host: the trainer, which writes the message.
    """
    best = min(report.get("ladder_nll") or [math.inf])
    if nll <= MAX_DEPARTURE * best or report.get("num_draws_before_stop") == 0:
        return
    host.warn(
        "%s: the held-out rows have %.4g nats under the draws, and had %.4g under the chains when T was chosen: the "
        "chains have left a place that predicted well, and have not arrived. Use larger batches or more updates, or a "
        "temperature of 0.1 or below",
        name, nll, best,
    )  # fmt: skip


def has_choices(record: StepRecord, problem: Problem) -> bool:
    """Return whether ``report_step_size`` has something to say after this update; the same in all processes."""
    is_end = record.step == problem.num_steps and "noise_growth" in record.info
    return is_end or "gradient_variance" in record.info


def report_step_size(
    record: StepRecord, method: MethodConfig, problem: Problem, updates_of_epoch: float | None, host: TrainerHost
) -> None:
    """Log what a sampler chose after it measured the noise of its gradients, and how many draws the run can make.

    Args:
        record: the record of an update (``has_choices``), with ``info`` of the chains of all processes.
        method: the method of the run.
        problem: the problem of the run.
        updates_of_epoch: the number of updates in an epoch; None if the data have no length.
        host: the trainer, which writes the message.
    """
    if "noise_growth" in record.info and record.step == problem.num_steps:
        _report_growth(record.info, method.name, host)
    if "gradient_variance" not in record.info:
        return
    name, relaxation = method.name, float(record.info["relaxation"].max())
    left = problem.num_steps - max(problem.burn_in, record.step)
    epochs = "" if updates_of_epoch is None else f" ({relaxation / updates_of_epoch:.2g} epochs)"
    host.say("%s: %s", name, describe_trial(record.info))
    if method.requirements.chooses_temperature:
        _report_steps_of_ladder(record.info, name, left, host)
        return
    worth = (
        f"A chain forgets its past in {relaxation:.0f} updates{epochs}; the {left} updates after burn-in are worth "
        f"{left / relaxation:.2g} independent draws of a chain"
    )
    step_size, variance = float(record.info["step_size"].mean()), float(record.info["gradient_variance"].mean())
    if left >= relaxation:
        text = "%s: step size %.2g in whitened coordinates (gradient variance %.3g). %s"
        host.say(text, name, step_size, variance, worth)
    else:
        least = math.ceil(problem.num_steps * relaxation / max(left, 1))
        host.warn(
            "%s: the run is too short. %s. So the draws stay near the weights where AdamW ended. One independent draw "
            "takes a run of %d updates (max_steps), or fewer with larger batches (step size %.2g, gradient variance "
            "%.3g)",
            name, worth, least, step_size, variance,
        )  # fmt: skip


def _report_steps_of_ladder(info: Mapping[str, Tensor], name: str, left: int, host: TrainerHost) -> None:
    """Say how far the chains of a ladder will get. Held-out rows judge them, so a chain that stays near is no fault."""
    host.say(
        "%s: a chain forgets its past in %.0f (the hottest) to %.0f updates (the coldest), and %d updates follow "
        "burn-in. The draws of a chain that needs longer stay near the weights where AdamW ended. The held-out rows "
        "choose by predictions, not by how far the chains get",
        name, float(info["relaxation"].min()), float(info["relaxation"].max()), left,
    )  # fmt: skip


def _report_growth(info: Mapping[str, Tensor], name: str, host: TrainerHost) -> None:
    """Say how far noise along the way has made the steps of a finished run smaller."""
    if float(info["noise_growth"].max()) <= NOTABLE_GROWTH:
        return
    host.say(
        "%s: on the way of the chains the variance of a gradient grew, to %.3g times that of their starts at most. "
        "Their step size fell to %.2g, and a chain now forgets its past in up to %.0f updates",
        name,
        float(info["noise_growth"].max()),
        float(info["step_size"].mean()),
        float(info["relaxation"].max()),
    )


def describe_trial(info: Mapping[str, Tensor]) -> str:
    """Return sentences on where chains start, and whether their gradients have a control variate, with the reasons."""
    means = {name.removeprefix("trial_"): float(value.mean()) for name, value in info.items() if "trial_" in name}
    chains = len(info["trial_fits"])

    def of_chains(share: float) -> str:
        return f"{round(share * chains)} of {chains} chains"

    return (
        f"{of_chains(means['fits'])} start at a draw of the Gaussian approximation: on the way to such a draw the "
        f"gradient grows by {means['slope']:.2g} times what is expected, and its variance there is "
        f"{means['at_draw']:.3g}, against {means['at_start']:.3g} where AdamW ended. {of_chains(means['anchored'])} "
        f"use a control variate: the variance with it is {means['beside']:.3g}. It takes two gradients for each update "
        "and a pass over all rows, which may not take more gradients than the updates"
    )
