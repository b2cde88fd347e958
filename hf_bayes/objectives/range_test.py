"""A learning rate for AdamW from a short trial of several rates at once, on the member axis.

Every rate is a member that starts at the same weights and sees the same minibatches, for n updates with a rate that
falls linearly to 0. The best of them has the lowest mean loss over the last third of its updates. A rate at which a
number is not finite is out of the trial. A longer run needs a smaller rate, because its steps add up. With N updates
the rate is

    l = best sqrt(n / N)

The square root is a rule of thumb, no theorem: the steps of AdamW add up to between l sqrt(N) and l N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.chains.finite import NotFiniteError
from hf_bayes.chains.objective import Objective
from hf_bayes.chains.own_rate import MAX_UPDATES, MIN_UPDATES, best_rate, last_third
from hf_bayes.chains.run import Run, StepRecord
from hf_bayes.core.config import DEFAULT_ADAMW_RATE
from hf_bayes.core.types import Problem
from hf_bayes.methods.registry import adamw_rule

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""The rates of a trial, if the run is long enough for all of them."""

SHARE = 0.1
"""The share of a run's gradients that a trial may take."""

TYPICAL = 0.12
"""The usual peak of a run of N updates is TYPICAL / sqrt(N): 1e-2 for 150 updates, 1e-3 for 14,400, 2e-4 for 4e5."""

SHORT_FACTORS, SHORT_SHARE, SHORT_UPDATES = (0.1, 0.3, 1.0), 0.5, 4
"""The trial of a short run: its rates as factors of the usual rate, its largest share of the run, and its smallest
number of updates. The rates are far enough apart to be compared after a few updates on the same rows. The share is
large, because the runs that it matters to are a few gradients long, and learn little at a rate that is too small."""

MARGIN = 0.05
"""The share by which a smaller rate must lower the loss of a short trial to be taken instead of the usual rate.

Such a trial is nearly noise if there are many classes, because the loss has hardly begun to fall. It also favours small
rates, because it ends before their slowness shows.
"""


class RangeTest(NamedTuple):
    """The result of a trial.

    Attributes:
        learning_rate: the learning rate for the run.
        losses: rate -> mean loss of a likelihood term over the last third of its updates, in nats; NaN for a rate that
            is out of the trial. Empty without a trial.
        num_updates: n, updates of the trial; 0 if the run is too short for one.
        usual: the rate of the trial that the others have to beat by ``MARGIN``, if there is one.
    """

    learning_rate: float
    losses: dict[float, float]
    num_updates: int
    usual: float | None = None

    def describe(self) -> str:
        """Return one sentence: the rate, and why."""
        if not self.losses:
            return (
                f"learning rate {self.learning_rate:.2g}: the run is too short to try several, and to learn much. "
                "Train longer, or give a learning rate"
            )
        tried = ", ".join(f"{rate:g}: {loss:.3g}" for rate, loss in self.losses.items())
        rule = "" if self.usual is None else f"; a rate below {self.usual:g} has to be {MARGIN:.0%} better"
        return (
            f"learning rate {self.learning_rate:.2g}, from a trial of {len(self.losses)} rates over {self.num_updates} "
            f"updates (loss {tried}{rule})"
        )


class TrialPlan(NamedTuple):
    """The rates of a trial, and its number n of updates; no rates if the run is too short for a trial.

    ``usual`` is the rate that the others have to beat by ``MARGIN``; None compares all rates alike.
    """

    rates: tuple[float, ...]
    num_updates: int
    usual: float | None = None


def plan_trial(gradients_per_chain: int, num_chains: int) -> TrialPlan:
    """Return the largest trial that a run with so many gradients of each chain can pay for."""
    gradients = gradients_per_chain * num_chains
    count = int(SHARE * gradients) // len(RATES)
    if count >= MIN_UPDATES:
        return TrialPlan(RATES, min(count, MAX_UPDATES))
    count = max(int(SHARE * gradients) // len(SHORT_FACTORS), SHORT_UPDATES)
    if count * len(SHORT_FACTORS) > SHORT_SHARE * gradients:
        return TrialPlan((), 0)
    rates = tuple(float(f"{TYPICAL / math.sqrt(count) * factor:.2g}") for factor in SHORT_FACTORS)
    return TrialPlan(rates, count, rates[-1])


@torch.no_grad()
def range_test(
    objective: Objective,
    start: Tensor,
    problem: Problem,
    updates: Iterable[list[Any]],
    *,
    plan: TrialPlan,
    num_steps: int,
    prior_weight: float = 1.0,
    progress: bool = False,
) -> RangeTest:
    """Try the rates of a plan and return a learning rate for ``num_steps`` updates of AdamW.

    Args:
        objective: the objective of as many chains as there are rates, which share their rows.
        start: [d], where all members begin.
        problem: the run that the rate is for.
        updates: the batches of each update.
        plan: see ``plan_trial``.
        num_steps: N, the updates that AdamW makes in the run.
        prior_weight: see ``MethodConfig.prior_weight``.
        progress: show a bar.
    Raises:
        FloatingPointError: if at every rate a number is not finite.
    """
    rates, num_updates, usual = plan
    if not rates:
        return RangeTest(DEFAULT_ADAMW_RATE, {}, 0)
    rule = adamw_rule(problem, prior_weight=prior_weight, rates=start.new_tensor(rates))
    theta, no_draws = start.expand(len(rates), -1).clone(), problem._replace(draw_steps=range(0))
    run = Run(rule, objective, theta, (), no_draws, leaves_out_lost=True)
    steps = tqdm(range(num_updates), desc="trying learning rates", disable=not progress, leave=False)
    losses = []
    for step, batches in zip(steps, updates, strict=False):
        try:
            losses.append(_loss(run.update(batches, 1 - step / num_updates)))
        except NotFiniteError as error:
            raise FloatingPointError(_none_is_left(error, objective, rates)) from None
    found = dict(zip(rates, last_third(losses).mean(0).tolist(), strict=True))
    best = _best_rate(found, usual)
    return RangeTest(best * math.sqrt(num_updates / num_steps), found, num_updates, usual)


def _loss(record: StepRecord) -> Tensor:
    """Return the loss [M] of an update; NaN for a rate that is out of the trial."""
    assert record.loss is not None
    assert record.lost is not None
    return record.loss.masked_fill(record.lost, math.nan)


def _none_is_left(error: NotFiniteError, objective: Objective, rates: tuple[float, ...]) -> str:
    """Return the message of a trial that has lost its last rate."""
    words, data = objective.words, "check the data and the model's weights for NaN"
    what = f"non-finite {words.value} or {words.gradient}"
    if error.step == 1:  # all members are at the start still, so the rates are not the reason
        return f"{what} at the weights where the trial of learning rates starts{error.place}: {data}{words.cause}"
    return (
        f"{what} at every learning rate of the trial ({', '.join(f'{rate:g}' for rate in rates)}), at the last of them "
        f"in {words.step} {error.step}. No learning rate was given: give one below {min(rates):g} (learning_rate, or "
        f"warm_start_learning_rate of a sampler), or {data}{words.cause}"
    )


def _best_rate(losses: dict[float, float], usual: float | None) -> float:
    """Return the rate with the lowest loss; the usual one if none is better by ``MARGIN``."""
    best = best_rate(losses)
    if usual is None or not math.isfinite(losses[usual]):
        return best
    needed = losses[usual] - MARGIN * abs(losses[usual])  # a density's loss may be negative
    return best if losses[best] < needed else usual
