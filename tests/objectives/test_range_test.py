"""Learning rates that are tried on the member axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.chains.run import Run
from hf_bayes.core.config import DEFAULT_ADAMW_RATE
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.objectives.range_test import RATES, RangeTest, TrialPlan, plan_trial, range_test

PROBLEM = Problem(
    num_data=1, prior=GaussianPrior(torch.tensor(0.0), torch.tensor(1e6)), learning_rate=1.0, num_steps=100, burn_in=0,
    shapes={"w": (3,)},
)  # fmt: skip


class Valley:
    """A loss of |theta - distance|: AdamW gets as far as its steps add up to, n / 2 times its rate."""

    words = FailureWords("log-likelihood", "gradient", "update", "look")

    def __init__(self, distance: float) -> None:
        self.distance = distance

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> Any:
        return self

    def __call__(self, theta: Tensor, *, gradient: bool = True, **options: Any) -> Any:
        away = theta - self.distance
        loss = away.abs().mean(1)
        return Evaluation(-loss, -away.sign() / 3, loss=loss)

    def info(self) -> dict[str, Tensor]:
        return {}

    def data_pass(self, theta: Tensor, what: Any, *, gradient: bool) -> Any:
        raise AssertionError

    def place_of(self, column: int) -> str:
        return ""


def tried(distance: float, num_updates: int = 20, num_steps: int = 80) -> RangeTest:
    updates, plan = [[None]] * num_updates, TrialPlan(RATES if num_updates else (), num_updates)
    return range_test(Valley(distance), torch.zeros(3), PROBLEM, updates, plan=plan, num_steps=num_steps)


@pytest.mark.parametrize(("distance", "best"), [(0.1, 1e-2), (1.0, 1e-1), (1e-3, 1e-3)])
def test_the_best_rate_is_the_one_that_arrives(distance: float, best: float) -> None:
    found = tried(distance)
    assert min(found.losses, key=found.losses.__getitem__) == best
    assert found.learning_rate == best * math.sqrt(20 / 80)
    assert found.num_updates == 20


def test_members_with_their_own_rates_are_separate_runs() -> None:
    found = tried(0.05)
    for rate, loss in found.losses.items():
        run = Run(MAPConfig().build(PROBLEM), Valley(0.05), torch.zeros(1, 3), (), PROBLEM)
        losses = [float(run.update([None], rate * (1 - step / 20)).loss) for step in range(20)]
        assert loss == pytest.approx(sum(losses[-6:]) / 6, rel=1e-6)  # one rounding of float32


@pytest.mark.parametrize(
    ("num_steps", "num_chains", "rates", "updates"),
    [(120, 1, 3, 4), (256, 1, 3, 8), (100, 4, 6, 6), (200, 4, 6, 13), (600, 1, 6, 10), (10**6, 4, 6, 40)],
)
def test_a_trial_takes_at_most_a_tenth_of_the_run(num_steps: int, num_chains: int, rates: int, updates: int) -> None:
    plan = plan_trial(num_steps, num_chains)
    assert (len(plan.rates), plan.num_updates) == (rates, updates)
    assert rates * updates <= 0.1 * num_steps * num_chains


def test_a_short_run_tries_three_rates_below_the_usual_one() -> None:
    assert plan_trial(24, 1) == TrialPlan((0.006, 0.018, 0.06), 4, 0.06)  # half of the run
    assert plan_trial(23, 1) == TrialPlan((), 0)


class Known(Valley):
    """A loss that each member has in every update, whatever its weights are."""

    def __init__(self, *losses: float) -> None:
        self.losses = losses

    def __call__(self, theta: Tensor, *, gradient: bool = True, **options: Any) -> Any:
        loss = torch.tensor(self.losses)
        return Evaluation(torch.zeros_like(loss), torch.zeros_like(theta), loss=loss)


@pytest.mark.parametrize(
    ("losses", "best"),
    [((5.0, 4.95, 5.0), 0.04), ((5.0, 4.7, 5.0), 0.01), ((5.0, 4.9, 4.8), 0.04), ((5.0, 5.1, math.nan), 0.004),
     ((-1.0, -1.02, -1.0), 0.04), ((-1.0, -1.1, -1.0), 0.01)],
    ids=["nearly equal", "clearly better", "worse", "not finite", "negative and equal", "negative and better"],
)  # fmt: skip
def test_a_smaller_rate_needs_a_margin_in_a_short_trial(losses: tuple[float, ...], best: float) -> None:
    plan = TrialPlan((0.004, 0.01, 0.04), 10, usual=0.04)
    found = range_test(Known(*losses), torch.zeros(3), PROBLEM, [[None]] * 10, plan=plan, num_steps=1000)
    assert found.learning_rate == best * 0.1
    assert found.describe().endswith("; a rate below 0.04 has to be 5% better)")


def test_a_run_too_short_to_try_takes_the_default() -> None:
    found = tried(1.0, num_updates=0)
    assert found == RangeTest(DEFAULT_ADAMW_RATE, {}, 0)
    words = "the run is too short to try several, and to learn much. Train longer, or give a learning rate"
    assert found.describe() == f"learning rate 0.001: {words}"


def test_the_description_names_every_rate_and_its_loss() -> None:
    text = tried(0.1).describe()
    assert text.startswith("learning rate 0.005, from a trial of 6 rates over 20 updates (loss 0.0003: 0.097, ")
    assert text.count(":") == 6


def test_a_rate_whose_loss_is_not_finite_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    valley = Valley.__call__

    def spoilt(self: Valley, theta: Tensor, **options: Any) -> Any:
        found = valley(self, theta, **options)
        loss = torch.where(torch.arange(6) == 3, torch.nan, found.loss)  # of the best rate
        return found._replace(loss=loss)

    monkeypatch.setattr(Valley, "__call__", spoilt)
    found = tried(0.1)
    assert math.isnan(found.losses[1e-2])
    assert found.learning_rate == 0.05  # of 1e-1, the next best
