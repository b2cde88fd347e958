"""Learning rates that are tried on the member axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.chains.run import Run
from hf_bayes.core.config import DEFAULT_ADAMW_RATE, MethodConfig
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.assembly import adamw_rule
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives.range_test import (
    FACTORS,
    FEW_FACTORS,
    TYPICAL,
    TYPICAL_OF_LONG,
    RangeTest,
    TrialPlan,
    plan_for,
    plan_trial,
    range_test,
)

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


PLAN = TrialPlan((0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03), 0.01, 20)


def tried(distance: float, plan: TrialPlan = PLAN) -> RangeTest:
    updates = [[None]] * plan.num_updates
    return range_test(Valley(distance), torch.zeros(3), PROBLEM, updates, plan=plan, num_steps=80)


@pytest.mark.parametrize(("distance", "best"), [(0.1, 0.01), (1.0, 0.03), (0.001, 0.0001)])
def test_the_best_rate_is_the_one_that_arrives(distance: float, best: float) -> None:
    found = tried(distance)
    assert min(found.losses, key=found.losses.__getitem__) == best
    assert found.learning_rate == best * math.sqrt(20 / 80)
    assert found.usual == 0.01
    assert found.num_updates == 20


def test_members_with_their_own_rates_are_separate_runs() -> None:
    found = tried(0.05)
    for rate, loss in found.losses.items():
        run = Run(MAPConfig().build(PROBLEM), Valley(0.05), torch.zeros(1, 3), (), PROBLEM)
        losses = [float(run.update([None], rate * (1 - step / 20)).loss) for step in range(20)]
        assert loss == pytest.approx(sum(losses[-6:]) / 6, rel=1e-6)  # one rounding of float32


@pytest.mark.parametrize(
    ("gradients", "factors", "updates", "share"),
    [(32, FEW_FACTORS, 4, 0.5), (160, FEW_FACTORS, 5, 0.14), (300, FEW_FACTORS, 10, 0.14),
     (1200, FEW_FACTORS, 10, 0.034), (1600, FEW_FACTORS, 12, 0.03),
     (2000, FACTORS, 10, 0.03), (4800, FACTORS, 24, 0.03), (8000, FACTORS, 40, 0.03), (10**6, FACTORS, 40, 0.03)],
)  # fmt: skip
def test_a_trial_takes_a_small_part_of_the_run(
    gradients: int, factors: tuple[float, ...], updates: int, share: float
) -> None:
    plan = plan_trial(gradients)
    usual = (TYPICAL_OF_LONG if factors is FACTORS else TYPICAL) / math.sqrt(updates)
    assert plan == TrialPlan(tuple(usual * factor for factor in factors), usual, updates)
    assert usual in plan.rates
    assert len(plan.rates) * updates <= share * gradients


@pytest.mark.parametrize(
    ("method", "gradients"), [(MAPConfig(num_chains=2), 2000), (MeanFieldConfig(num_draws=4), 4000)]
)
def test_the_plan_counts_the_gradients_of_all_chains(method: MethodConfig, gradients: int) -> None:
    assert plan_for(method, 1000) == plan_trial(gradients)


def test_a_run_of_a_few_gradients_has_no_trial() -> None:
    assert plan_trial(31).rates == ()


class Known(Valley):
    """A loss that each member has in every update, whatever its weights are."""

    def __init__(self, *losses: float) -> None:
        self.losses = losses

    def __call__(self, theta: Tensor, *, gradient: bool = True, **options: Any) -> Any:
        loss = torch.tensor(self.losses)
        return Evaluation(torch.zeros_like(loss), torch.zeros_like(theta), loss=loss)


@pytest.mark.parametrize(
    ("losses", "best"),
    [((4.95, 5.0, 5.0), 0.01), ((4.7, 5.0, 5.0), 0.004), ((5.0, 5.0, 4.95), 0.01), ((5.0, 5.0, 4.7), 0.04),
     ((4.9, 4.8, 5.0), 0.01), ((5.0, math.nan, 5.1), 0.004), ((-1.02, -1.0, -1.0), 0.01), ((-1.1, -1.0, -1.0), 0.004)],
    ids=["nearly equal", "better", "larger and equal", "larger and better",
         "worse", "not finite", "negative, equal", "negative, better"],
)  # fmt: skip
def test_another_rate_than_the_usual_one_needs_a_margin(losses: tuple[float, ...], best: float) -> None:
    plan = TrialPlan((0.004, 0.01, 0.04), 0.01, 10)
    found = range_test(Known(*losses), torch.zeros(3), PROBLEM, [[None]] * 10, plan=plan, num_steps=1000)
    assert found.learning_rate == best * 0.1
    assert found.describe().endswith("; a rate other than the usual 0.01 has to be 5% better)")


def test_a_run_too_short_to_try_takes_the_default() -> None:
    found = tried(1.0, plan_trial(0))
    assert (found.learning_rate, found.losses, found.num_updates) == (DEFAULT_ADAMW_RATE, {}, 0)
    words = "the run is too short to try several, and to learn much. Train longer, or give a learning rate"
    assert found.describe() == f"learning rate 0.001: {words}"


def test_the_description_names_every_rate_and_its_loss() -> None:
    text = tried(0.1).describe()
    assert text.startswith("learning rate 0.005, from a trial of 6 rates over 20 updates (loss 0.0001: 0.099, ")
    assert text.count(":") == 6


class Spoilt(Valley):
    """A valley in which numbers of members are not finite from update ``begin`` (from 0) on.

    Args:
        spoil: (evaluation, members) -> the evaluation in which numbers of these members are not finite.
        members: all by default.
    """

    def __init__(self, spoil: Any, *, begin: int = 0, members: tuple[int, ...] = tuple(range(len(FACTORS)))) -> None:
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
    updates, whole = [[None]] * 20, tried(0.1).losses
    valley = Spoilt(spoil, begin=begin, members=(3, 4))  # the best rate is one of them
    found = range_test(valley, torch.zeros(3), PROBLEM, updates, plan=PLAN, num_steps=80)
    assert [rate for rate, loss in found.losses.items() if math.isnan(loss)] == [0.003, 0.01]
    assert all(loss == whole[rate] for rate, loss in found.losses.items() if not math.isnan(loss))
    assert found.learning_rate == 0.03 * math.sqrt(20 / 80)  # the next best


def test_a_trial_is_the_run_of_all_its_rates_bit_by_bit() -> None:
    rule = adamw_rule(PROBLEM, rates=torch.tensor(PLAN.rates))
    run = Run(rule, Valley(0.1), torch.zeros(6, 3), (), PROBLEM)
    losses = [run.update([None], 1 - step / 20).loss for step in range(20)]
    means = torch.stack([loss for loss in losses if loss is not None])[-6:].mean(0)
    assert list(tried(0.1).losses.values()) == means.tolist()


def test_a_trial_that_loses_every_rate_says_that_none_was_given() -> None:
    updates = [[None]] * 20
    valley = Spoilt(overflowing, begin=7)
    valley.words = valley.words._replace(cause=". It may have overflowed")
    words = (
        r"non-finite log-likelihood or gradient at every learning rate of the trial \(0.0001, .* 0.03\), at the last "
        r"of them in update 8\. No learning rate was given: give one below 0.0001 .*, or check .* for NaN\. It may"
    )
    with pytest.raises(FloatingPointError, match=words):
        range_test(valley, torch.zeros(3), PROBLEM, updates, plan=PLAN, num_steps=80)


@pytest.mark.parametrize(("spoil", "place"), [(overflowing, r", w\[0\]"), (element_of_gradient, r", w\[1\]")])
def test_a_start_that_is_not_finite_is_no_fault_of_the_rates(spoil: Any, place: str) -> None:
    updates = [[None]] * 20
    words = f"non-finite .* at the weights where the trial of learning rates starts{place}: check the data and the"
    with pytest.raises(FloatingPointError, match=words):
        range_test(Spoilt(spoil), torch.zeros(3), PROBLEM, updates, plan=PLAN, num_steps=80)
