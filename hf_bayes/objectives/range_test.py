"""A learning rate for AdamW from a short trial of several rates at once, on the member axis.

Every rate is a member that starts at the same weights and sees the same minibatches, for n updates with a rate that
falls linearly to 0. The loss of a rate is its mean over the last third of its updates. A rate at which a number is not
finite is out of the trial. A longer run needs a smaller rate, because its steps add up. With N updates the rate is

    l = best sqrt(n / N)

The square root is a rule of thumb, no theorem: the steps of AdamW add up to between l sqrt(N) and l N. By this rule
there is a usual rate for each n. A trial tries multiples of it, and keeps it unless another rate is clearly better.
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
from hf_bayes.chains.own_settings import MAX_UPDATES, best_rate, last_third
from hf_bayes.chains.run import Run, StepRecord
from hf_bayes.core.config import DEFAULT_ADAMW_RATE, MethodConfig
from hf_bayes.core.types import Problem
from hf_bayes.methods.assembly import adamw_rule

TYPICAL, TYPICAL_OF_LONG = 0.134, 0.19
"""The usual peak of a run of N updates is TYPICAL / sqrt(N): 1e-2 for 180 updates. In runs that can pay for a trial of
all ``FACTORS`` it is TYPICAL_OF_LONG / sqrt(N): 1e-3 for 36,000. Earlier trials, of fixed rates, found these on
every task of docs/results/recommend.md, which has runs at 0.7 times and at twice the rate, too."""

FACTORS, FEW_FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), (0.1, 0.3, 1.0, 3.0)
"""The rates of a trial as multiples of the usual one, and those of a run that cannot pay for all of them. Both have a
larger one: a last layer may learn faster at three times the usual rate. The model of the quickstart needs a third of
it, and learns less at a tenth."""

SHARE, ENOUGH_UPDATES = 0.03, 10
"""The share of a run's gradients that a trial takes, and the updates for which it tries a rate at least. On one of the
eight tasks six updates were too few: the loss at the usual rate had risen at first, and had not come down yet."""

SHORT_SHARE, MIN_UPDATES, MOST = 0.14, 4, 0.5
"""For a shorter run: the share of its gradients that a trial takes, the fewest updates for each rate, and the largest
share that these updates may take. The last is large, because runs of a few gradients learn little at a rate that is too
small."""

MARGIN = 0.05
"""The share by which a rate must lower the loss to be taken instead of the usual one.

A short trial is nearly noise if there are many classes, because the loss has hardly begun to fall. It also favours
small rates, because it ends before their slowness shows.
"""


class RangeTest(NamedTuple):
    """The result of a trial.

    Attributes:
        learning_rate: the learning rate for the run.
        losses: rate -> mean loss of a likelihood term over the last third of its updates, in nats; NaN for a rate that
            is out of the trial. Empty without a trial.
        usual: the rate of the trial that the others have to beat by ``MARGIN``; NaN without a trial.
        num_updates: n, the number of updates of the trial; 0 if the run is too short for one.
    """

    learning_rate: float
    losses: dict[float, float]
    usual: float
    num_updates: int

    def describe(self) -> str:
        """Return one sentence: the rate, and why."""
        if not self.losses:
            return (
                f"learning rate {self.learning_rate:.2g}: the run is too short to try several, and to learn much. "
                "Train longer, or give a learning rate"
            )
        tried = ", ".join(f"{rate:.2g}: {loss:.3g}" for rate, loss in self.losses.items())
        return (
            f"learning rate {self.learning_rate:.2g}, from a trial of {len(self.losses)} rates over {self.num_updates} "
            f"updates (loss {tried}; a rate other than the usual {self.usual:.2g} has to be {MARGIN:.0%} better)"
        )


class TrialPlan(NamedTuple):
    """The trial of a run.

    Attributes:
        rates: the learning rates to try; none if the run is too short for a trial.
        usual: the rate that the others have to beat by ``MARGIN``.
        num_updates: n, the number of updates of the trial.
    """

    rates: tuple[float, ...]
    usual: float
    num_updates: int


def plan_for(method: MethodConfig, num_steps: int) -> TrialPlan:
    """Return the trial that a run of ``num_steps`` updates of this method can pay for."""
    return plan_trial(math.ceil(num_steps * method.requirements.gradients_per_update) * method.num_chains)


def usual_rate(num_updates: int) -> float:
    """Return the usual peak rate of so many updates of AdamW."""
    return TYPICAL / math.sqrt(num_updates)


def plan_trial(gradients: int) -> TrialPlan:
    """Return the trial that a run of so many gradients, of all its chains, can pay for."""
    for factors, typical in ((FACTORS, TYPICAL_OF_LONG), (FEW_FACTORS, TYPICAL)):
        count = int(SHARE * gradients) // len(factors)
        if count >= ENOUGH_UPDATES:
            return trial_around(typical, min(count, MAX_UPDATES), factors)
    count = max(MIN_UPDATES, min(int(SHORT_SHARE * gradients) // len(FEW_FACTORS), ENOUGH_UPDATES))
    return trial_around(TYPICAL, count, FEW_FACTORS if count * len(FEW_FACTORS) <= MOST * gradients else ())


def trial_around(typical: float, num_updates: int, factors: tuple[float, ...] = FACTORS) -> TrialPlan:
    """Return the trial of so many updates, of multiples of the usual rate typical / sqrt(updates)."""
    usual = typical / math.sqrt(num_updates)
    return TrialPlan(tuple(usual * factor for factor in factors), usual, num_updates)


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
        plan: the rates to try, see ``plan_for``.
        num_steps: N, the number of updates that AdamW makes in the run.
        prior_weight: the factor of the prior's energy, see ``MethodConfig.prior_weight``.
        progress: show a bar.
    Raises:
        FloatingPointError: if at every rate a number is not finite.
    """
    rates, usual, num_updates = plan
    if not rates:
        return RangeTest(DEFAULT_ADAMW_RATE, {}, math.nan, 0)
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
    return RangeTest(_chosen(found, usual) * math.sqrt(num_updates / num_steps), found, usual, num_updates)


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


def _chosen(losses: dict[float, float], usual: float) -> float:
    """Return the rate with the lowest loss; the usual one if none is better by ``MARGIN``."""
    best = best_rate(losses)
    if not math.isfinite(losses[usual]):
        return best
    needed = losses[usual] - MARGIN * abs(losses[usual])  # a density's loss may be negative
    return best if losses[best] < needed else usual
