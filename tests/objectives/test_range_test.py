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
from hf_bayes.methods.registry import adamw_rule
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

    def curvature(self, theta: Tensor, *options: Any, **more: Any) -> Any:
        raise AssertionError

    full_gradient = heldout = heldout_by_row = curvature

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


class Spoilt(Valley):
    """A valley in which numbers of members are not finite from update ``begin`` (from 0) on.

    Args:
        spoil: (evaluation, members) -> the evaluation in which numbers of these members are not finite.
        members: all by default.
    """

    def __init__(self, spoil: Any, *, begin: int = 0, members: tuple[int, ...] = tuple(range(len(RATES)))) -> None:
        super().__init__(0.1)
        self.spoil, self.begin, self.members, self.step = spoil, begin, torch.tensor(members), 0

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> Any:
        self.step = step
        return self

    def __call__(self, theta: Tensor, *, gradient: bool = True, **options: Any) -> Any:
        found = super().__call__(theta, gradient=gradient, **options)
        return self.spoil(found, self.members) if self.step >= self.begin else found

    def place_of(self, column: int) -> str:
        return f", w[{column}]"


def overflowing(found: Evaluation, members: Tensor) -> Evaluation:
    """Loss, log-likelihood and gradient of a model whose outputs overflow."""
    changed = {name: getattr(found, name).index_fill(0, members, math.inf) for name in ("loss", "grad_log_lik")}
    return found._replace(log_lik=found.log_lik.index_fill(0, members, -math.inf), **changed)


def element_of_gradient(found: Evaluation, members: Tensor) -> Evaluation:
    assert found.grad_log_lik is not None
    gradient = found.grad_log_lik.clone()
    gradient[members, 1] = math.nan
    return found._replace(grad_log_lik=gradient)


def steep(found: Evaluation, members: Tensor) -> Evaluation:
    """The gradient is finite, and its square, in AdamW's state, is not."""
    assert found.grad_log_lik is not None
    return found._replace(grad_log_lik=found.grad_log_lik.index_fill(0, members, 1e30))


@pytest.mark.parametrize("spoil", [overflowing, element_of_gradient, steep])
@pytest.mark.parametrize("begin", [0, 7, 19])
def test_a_rate_with_a_non_finite_number_only_loses(spoil: Any, begin: int) -> None:
    updates, plan, whole = [[None]] * 20, TrialPlan(RATES, 20), tried(0.1).losses
    valley = Spoilt(spoil, begin=begin, members=(3, 4))  # the best rate is one of them
    found = range_test(valley, torch.zeros(3), PROBLEM, updates, plan=plan, num_steps=80)
    assert [rate for rate, loss in found.losses.items() if math.isnan(loss)] == [1e-2, 3e-2]
    assert all(loss == whole[rate] for rate, loss in found.losses.items() if not math.isnan(loss))
    assert found.learning_rate == 0.05  # of 1e-1, the next best


def test_a_trial_is_the_run_of_all_its_rates_bit_by_bit() -> None:
    rule = adamw_rule(PROBLEM, rates=torch.tensor(RATES))
    run = Run(rule, Valley(0.1), torch.zeros(6, 3), (), PROBLEM)
    losses = [run.update([None], 1 - step / 20).loss for step in range(20)]
    means = torch.stack([loss for loss in losses if loss is not None])[-6:].mean(0)
    assert list(tried(0.1).losses.values()) == means.tolist()


def test_a_trial_that_loses_every_rate_says_that_none_was_given() -> None:
    updates, plan = [[None]] * 20, TrialPlan(RATES, 20)
    valley = Spoilt(overflowing, begin=7)
    valley.words = valley.words._replace(cause=". It may have overflowed")
    words = (
        r"non-finite log-likelihood or gradient at every learning rate of the trial \(0.0003, .* 0.1\), at the last of "
        r"them in update 8\. No learning rate was given: give one below 0.0003 .*, or check .* for NaN\. It may"
    )
    with pytest.raises(FloatingPointError, match=words):
        range_test(valley, torch.zeros(3), PROBLEM, updates, plan=plan, num_steps=80)


@pytest.mark.parametrize(("spoil", "place"), [(overflowing, r", w\[0\]"), (element_of_gradient, r", w\[1\]")])
def test_a_start_that_is_not_finite_is_no_fault_of_the_rates(spoil: Any, place: str) -> None:
    updates, plan = [[None]] * 20, TrialPlan(RATES, 20)
    words = f"non-finite .* at the weights where the trial of learning rates starts{place}: check the data and the"
    with pytest.raises(FloatingPointError, match=words):
        range_test(Spoilt(spoil), torch.zeros(3), PROBLEM, updates, plan=plan, num_steps=80)
