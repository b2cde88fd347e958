from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import chain_generators, generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import log_normal
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior, grad_energy
from hf_bayes.methods.variational.blob import BLoBConfig
from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
from hf_bayes.methods.variational.gaussian_vi import (
    EnergyGradient,
    ReparametrisedVIConfig,
    averaging_weight,
    gaussian_entropy,
    parts,
)
from hf_bayes.methods.variational.ivon import IVONConfig
from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives.informed_spread import SpreadPlan
from hf_bayes.training import final_measurements
from scripts.reproduce.exact_widths import DIM, NUM_ROWS, Regression
from tests.runs import trainer

TARGET = Regression.with_prior(1.0)
Config = ReparametrisedVIConfig | IVONConfig
SGD: Any = {"optimizer": "sgd", "momentum": 0.0, "init_std": 0.5}
FAMILIES: dict[str, Config] = {
    "mean_field": MeanFieldConfig(**SGD),
    "stick_the_landing": MeanFieldConfig(estimator="stick_the_landing", **SGD),
    "blob": BLoBConfig(points="point", **SGD),
    "low_rank_vi": LowRankVIConfig(rank=2, **SGD),
    "full_rank_vi": FullRankVIConfig(**SGD),
    "ivon": IVONConfig(momentum=0.0, precision_rate=0.01, init_std=0.5, pair_period=None),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def built(config: Config, num_draws: int) -> Rule[Any]:
    shapes = {"random": (DIM - 2,), "point": (2,)}
    rule = replace(config, num_draws=num_draws).build(Problem(NUM_ROWS, TARGET.prior, 0.01, 99, 0, shapes))
    assert isinstance(rule, Rule)
    return rule


def updated(rule: Rule[Any], state: Any, theta: Tensor) -> Any:
    evaluation, anchor = TARGET.evaluate(theta, None), rule.anchor(state)
    if anchor is not None:
        evaluation = evaluation._replace(anchor_grad=TARGET.gradient_at_each(anchor, None))
    return rule.update(state, evaluation, 0.01, [])[0]


def estimate(config: Config, state: Any, new: Any) -> Tensor:
    """Return the estimate [M, n, d] that an update has used; the first row is for the mean."""
    if not isinstance(config, IVONConfig):
        return torch.cat([NUM_ROWS * new.first[:, :1], new.first[:, 1:]], 1)
    x = (2 * new.precision / state.precision - 1).sqrt() - 1  # of s (1 + x + x^2 / 2)
    return torch.stack([new.gradient, x], 1)


def estimates_of_one_q(config: Config, num_draws: int, *, reuse: bool = False, count: int = 3000) -> Tensor:
    """Return independent estimates [count, n, d] for one q; ``reuse`` gives all pairs the noise of the first one."""
    rule, rngs = built(config, num_draws), [generator("draws")] * count
    state = rule.init(torch.zeros(count, DIM, dtype=torch.float64), rngs)
    state = type(state)(*(values[:1].expand_as(values).clone() for values in state))
    theta, state = rule.locate(state, rngs)
    if reuse:
        state = state._replace(noise=state.noise[:, :1].expand_as(state.noise))
    return estimate(config, state, updated(rule, state, theta))


CURVATURE = torch.tensor([2.0, 0.5, 7.0], dtype=torch.float64)


def pair(noise_of_batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return delta, and the gradients at mean + delta and mean - delta of a quadratic energy with a noisy slope."""
    delta = torch.randn(4, 3, generator=generator("delta"), dtype=torch.float64)
    return delta, CURVATURE * delta + noise_of_batch, -CURVATURE * delta + noise_of_batch


def test_the_odd_part_of_a_pair_is_free_of_the_batch_noise() -> None:
    delta, gradient, beside = pair(torch.full((4, 3), 5.0, dtype=torch.float64))
    linear = torch.zeros_like(delta)[:, None]
    even, odd = parts((gradient, beside), linear)
    torch.testing.assert_close(odd[:, 0], CURVATURE * delta)
    torch.testing.assert_close(even, torch.full_like(delta, 5.0))
    single = parts((gradient,), linear)[1][:, 0]
    assert (single - CURVATURE * delta).abs().min() > 4.9  # the twin: one draw keeps the noise


def test_the_linear_part_is_taken_from_the_parts_that_have_it() -> None:
    delta, gradient, beside = pair(torch.zeros(4, 3, dtype=torch.float64))
    even, odd = parts((gradient, beside), CURVATURE * delta[:, None])
    assert even.abs().max() == 0
    assert odd.abs().max() < 1e-14
    single_even, single_odd = parts((gradient,), CURVATURE * delta[:, None])
    assert max(single_even.abs().max(), single_odd.abs().max()) == 0


@every_family
def test_four_draws_give_the_mean_of_their_gradients(family: str) -> None:
    config, rngs = FAMILIES[family], chain_generators(0, 3, device="cpu")
    rule, single = built(config, 4), built(config, 1)
    state = rule.init(torch.zeros(3, DIM, dtype=torch.float64), rngs)
    for _ in range(4):  # until the guess of the linear part is not 0
        theta, state = rule.locate(state, rngs)
        state = updated(rule, state, theta)
    theta, state = rule.locate(state, rngs)
    anchor = rule.anchor(state)
    assert anchor is not None
    points = torch.cat([theta[:, None], anchor], 1)
    by_hand, alone = torch.zeros(3, DIM, dtype=torch.float64), []
    for number, point in enumerate(points.unbind(1)):
        gradient = TARGET.evaluate(point, None).grad_log_lik
        assert gradient is not None
        by_hand -= (gradient - point / TARGET.prior_std**2) / 4
        pair = number // 2
        at_point = state._replace(noise=(-1) ** number * state.noise[:, pair : pair + 1])
        alone.append(estimate(config, at_point, updated(single, at_point, point)))
    found, tolerance = estimate(config, state, updated(rule, state, theta)), {"rtol": 1e-12, "atol": 1e-12}  # float64
    torch.testing.assert_close(found[:, 0], by_hand, **tolerance)
    torch.testing.assert_close(found, torch.stack(alone).mean(0), **tolerance)
    torch.testing.assert_close(points[:, 0] + points[:, 1], points[:, 2] + points[:, 3], **tolerance)
    assert (points[:, 0] - points[:, 2]).abs().max() > 0.01  # the pairs differ


@every_family
@pytest.mark.statistics
def test_independent_pairs_divide_the_variance_by_their_number(family: str) -> None:
    config = FAMILIES[family]
    pair = estimates_of_one_q(config, 2)
    is_noisy = pair.std(0) > 1e-9  # points, and elements of W that are not free, have no noise
    size = pair.std(0)[is_noisy]

    def log_ratio(estimates: Tensor) -> tuple[float, float]:
        """Return the log of the ratio of the variances, and its standard error."""
        squares = [((each - each.mean(0))[:, is_noisy] / size).square().mean(1) for each in (pair, estimates)]
        error = sum(float(values.var() / values.mean() ** 2 / len(values)) for values in squares) ** 0.5
        return float(squares[0].mean().log() - squares[1].mean().log()), error

    ratio, error = log_ratio(estimates_of_one_q(config, 8))
    assert abs(ratio - math.log(4)) < 4 * error
    ratio, error = log_ratio(estimates_of_one_q(config, 8, reuse=True))
    assert abs(ratio - math.log(4)) > 4 * error  # the twin: four times the same pair


@every_family
def test_the_cost_of_an_update_counts_its_draws(family: str) -> None:
    config = FAMILIES[family]
    assert [replace(config, num_draws=k).requirements.gradients_per_update for k in (1, 2, 8)] == [1, 2, 8]


@pytest.mark.parametrize("config", [IVONConfig(), MeanFieldConfig(), LowRankVIConfig(rank=1), FullRankVIConfig()])
def test_one_parameter_is_enough(config: Config) -> None:
    found = sample(lambda theta, rows: theta.square().sum(1), torch.ones(1, 1), config, num_steps=4, learning_rate=0.1)
    assert isinstance(found.approximation, Gaussian)
    assert found.approximation.stds.shape == (1, 1)


def test_one_gradient_for_a_pair_is_no_update() -> None:
    rule, rngs = built(FAMILIES["mean_field"], 2), chain_generators(0, 3, device="cpu")
    theta, state = rule.locate(rule.init(torch.zeros(3, DIM, dtype=torch.float64), rngs), rngs)
    with pytest.raises(AssertionError, match=r"takes 2 gradients, got 1 \(Rule.anchor\)"):
        rule.update(state, TARGET.evaluate(theta, None), 0.01, [])


def test_pairs_are_the_default_of_optimisers() -> None:
    kinds = (MeanFieldConfig, LowRankVIConfig, FullRankVIConfig, BLoBConfig)
    assert [kind().requirements.gradients_per_update for kind in kinds] == [2, 2, 2, 2]


def test_the_trainer_evaluates_the_model_at_every_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []

    def plan_of_spread(objective: Any, plan: SpreadPlan, *, seed: int) -> None:
        counted.append(plan.num_gradients)

    monkeypatch.setattr(final_measurements, "measure_spread", plan_of_spread)
    calls = []
    for num_draws in (1, 4):
        made = trainer(tmp_path / str(num_draws), IVONConfig(num_draws=num_draws, pair_period=None), max_steps=2)
        passes: list[None] = []
        made.bayesian.register_forward_hook(lambda *found, passes=passes: passes.append(None))
        made.train()
        calls.append(len(passes))
    assert calls[1] - calls[0] == 2 * 3  # two updates, with three more draws each
    assert counted[1] == 4 * counted[0]


@every_family
@pytest.mark.parametrize(
    ("num_draws", "message"), [(0, "an integer >= 1, got 0"), (2.0, "an integer >= 1"), (5, "Use 4 or 6")]
)
def test_other_numbers_of_draws_are_refused(family: str, num_draws: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"num_draws must be .*{message}"):
        replace(FAMILIES[family], num_draws=num_draws)


@pytest.mark.parametrize(("burn_in", "first"), [(0, 10), (15, 15)])
def test_the_average_begins_after_burn_in_or_in_the_middle(burn_in: int, first: int) -> None:
    problem = Problem(1, FlatPrior(), 0.1, 20, burn_in, {"": (1,)})
    average = 0.0
    for count in range(1, 21):
        average += averaging_weight(problem, count) * (count - average)
        expected = count if count <= first else sum(range(first + 1, count + 1)) / (count - first)
        assert average == pytest.approx(expected)


@pytest.mark.parametrize("independent", [True, False])
def test_gradients_by_column_are_the_gradient_of_the_energy(independent: bool) -> None:
    theta = torch.randn(2, 3, generator=generator("theta"), dtype=torch.float64)
    mean, std = torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), 0.8, dtype=torch.float64)
    prior = GaussianPrior(mean, std) if independent else Gaussian.diagonal(mean[None], std[None])
    of = EnergyGradient.of(2 * theta, prior, lambda: theta, weight=0.3)
    log_prior, gradient = of.at(theta, *of.tensors)
    evaluation = Evaluation(torch.zeros(2), 2 * theta)
    torch.testing.assert_close(gradient, grad_energy(evaluation, theta, prior, prior_weight=0.3))
    torch.testing.assert_close(of.log_prior + log_prior, prior.log_prob(theta))


def test_the_entropy_is_minus_the_mean_log_density() -> None:
    std = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    q = Gaussian.diagonal(torch.zeros(1, 3, dtype=torch.float64), std[None])
    at_one_std = -log_normal(q.covariances[0], std)  # the mean square of a coordinate is its variance
    assert math.isclose(gaussian_entropy(std.log().sum(), 3), at_one_std)
