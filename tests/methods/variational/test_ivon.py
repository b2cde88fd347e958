from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import chain_generators, generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior
from hf_bayes.methods.variational.ivon import IVONConfig
from scripts.reproduce.exact_widths import DIM, NUM_ROWS, Regression, errors, fit, relative_widths
from tests.runs import trainer

MEAN = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
STD = torch.tensor([0.3, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def diagonal(theta: Tensor, batch: object = None) -> Tensor:
    return 0.5 * ((theta - MEAN) / STD).square().sum(1)


def recovery_error(config: IVONConfig, temperature: float) -> float:
    """Return the worst error of a mean in stds, or of a std relative to itself, on a diagonal Gaussian."""
    theta = torch.zeros(2, 5, dtype=torch.float64)
    q = sample(diagonal, theta, config, num_steps=1200, learning_rate=0.03).approximation
    assert isinstance(q, Gaussian)
    std = STD * math.sqrt(temperature)
    return max(((q.means - MEAN) / std).abs().max().item(), (q.stds / std - 1).abs().max().item())


@pytest.mark.statistics
@pytest.mark.parametrize("num_draws", [1, 2])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_diagonal_gaussian_is_recovered_to_one_percent(temperature: float, num_draws: int) -> None:
    config = IVONConfig(temperature=temperature, num_draws=num_draws)
    assert recovery_error(config, temperature) < 0.01  # the requirement; there is no noise, and 600 updates forget
    # the twin: a T that is 5 % too high widens q by 2.5 %
    assert recovery_error(dataclasses.replace(config, temperature=1.05 * temperature), temperature) > 0.01


@pytest.mark.statistics
def test_an_unstated_rate_recovers_stds_of_any_size() -> None:
    scales = torch.tensor([1e-4, 1e-2, 1.0, 1e2], dtype=torch.float64)
    q = sample(
        lambda theta, batch: 0.5 * (theta / scales).square().sum(1),
        scales[None],
        IVONConfig(),
        num_steps=2500,
        learning_rate=2500**-0.5,
    ).approximation
    assert isinstance(q, Gaussian)
    assert (q.stds / scales - 1).abs().max() < 0.01  # from a start of 1e-2: sqrt(n) = 50 e-foldings forget it


@pytest.mark.parametrize("period", [None, 3])
def test_updates_follow_the_equations(period: int | None) -> None:
    prior = GaussianPrior(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64))
    config = IVONConfig(temperature=0.7, init_std=0.2, momentum=0.8, precision_rate=0.3, pair_period=period)
    rule = config.build(Problem(10, prior, 0.1, 20, 0, {"": (5,)}))
    rngs = [generator(0)]
    state = rule.init(torch.zeros(1, 5, dtype=torch.float64), rngs)
    mean, s = torch.zeros(5, dtype=torch.float64), torch.full((5,), 0.7 / 0.04, dtype=torch.float64)
    running, spread = torch.zeros(()), [0.0, 0.0]
    for step in range(1, 21):
        theta, state = rule.locate(state, rngs)
        rate, delta, is_pair = 0.1 / step, theta[0] - mean, period is not None and step % period == 1
        points = [theta[0], mean - delta] if is_pair else [theta[0]]
        # of U_lik, not quadratic
        of_likelihood = [4 * point.pow(3) + (point - MEAN) / STD.square() for point in points]
        gradients = [found + (point - 0.5) / 0.64 for found, point in zip(of_likelihood, points, strict=True)]
        even, odd = sum(gradients) / len(points), (gradients[0] - gradients[-1]) / 2 if is_pair else gradients[0]
        running = 0.8 * running + 0.2 * (even if is_pair else even - s * delta)
        std = (0.7 / s).sqrt()
        x = (odd - s * delta) * delta / 0.7  # (h - s) / s
        weight = 1.0
        if period is not None:
            known = [1 - 0.99 ** sum((n % period == 1) == kind for n in range(1, step)) for kind in (False, True)]
            ratio = (spread[1] / known[1]) / (spread[0] / known[0]) if all(known) else 1.0
            a = min(1.0, max(1 / period, ratio))
            weight = period / (1 + (period - 1) * a) * (1 if is_pair else a)
        spread[is_pair] += 0.01 * (float(x.square().mean()) - spread[is_pair])
        y = (weight * 3 * rate * x).clamp(-1, 1)
        mean, s = mean - (rate * running / (1 - 0.8**step) / s).clamp(-std, std), s * (1 + y + y**2 / 2)
        beside = -of_likelihood[1][None, None] if is_pair else None
        assert (rule.anchor(state) is None) == (beside is None)
        evaluation = Evaluation(torch.zeros(1), -of_likelihood[0][None], anchor_grad=beside)
        state, _ = rule.update(state, evaluation, rate, rngs)
    torch.testing.assert_close(state.iterate[0], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.precision[0], s, rtol=1e-12, atol=0)


def test_precisions_stay_positive_where_curvature_is_negative() -> None:
    result = sample(
        lambda theta, batch: -50 * theta.square().sum(1),
        torch.zeros(4, 5),
        IVONConfig(init_std=1.0),
        num_steps=30,
        learning_rate=0.5,
    )
    assert (result.state.precision > 0).all()
    assert result.state.variance.isfinite().all()


@pytest.mark.statistics
@pytest.mark.parametrize("prior_std", [1.0, 10.0])
def test_a_logistic_regression_ends_at_the_optimum(prior_std: float) -> None:
    target = Regression.with_prior(prior_std)
    best = target.optimum()
    q = fit(target, IVONConfig(), num_steps=4000, learning_rate=4000**-0.5, num_chains=16)
    assert errors(target, q, best).free_energy < 0.02  # the requirements, as in the next line
    # of one chain, in the worst element: .8 to 1 % is noise of the draws, and the largest of 96 would be 3 times that
    assert (relative_widths(target, q, best) - 1).square().mean(0).sqrt().max() < 0.02
    # the twin: a T that is 10 % too high widens q by 5 %
    assert errors(target, fit(target, IVONConfig(temperature=1.1), num_steps=1000, learning_rate=0.03), best).std > 0.02


def variances_of_curvature(target: Regression, *, count: int = 20_000) -> tuple[float, float]:
    """Return the relative variances of h at the optimum, from one gradient of 32 rows and from a pair."""
    best, rng = target.optimum(), generator("estimates")
    eps = torch.randn(count, DIM, generator=rng, dtype=torch.float64)
    rows = torch.rand(count, NUM_ROWS, generator=rng).argsort(1)[:, :32]

    def gradient(sign: int) -> Tensor:
        theta = best.mean + sign * best.std * eps
        found = target.evaluate(theta, rows).grad_log_lik
        assert found is not None
        return theta / target.prior_std**2 - found

    single, beside = gradient(1), gradient(-1)
    odd = [(part - eps / best.std) * eps * best.std for part in (single, (single - beside) / 2)]
    return float(odd[0].var(0).mean()), float(odd[1].var(0).mean())


@pytest.mark.statistics
def test_widths_scatter_by_the_noise_of_the_estimates() -> None:
    target, averaged, period = Regression.with_prior(1.0), 1000, 14
    single, pair = variances_of_curvature(target)
    # the curvature's share is that of the rows, without replacement, and the draws add a tenth of it
    assert NUM_ROWS / 32 - 1 < 1.1 * single < 1.2 * (NUM_ROWS / 32 - 1)
    # of the mean over a period of one pair and p - 1 single gradients, weighted by their variances
    paired = period / (1 / pair + (period - 1) / single)
    found = []
    for each, variance in ((None, single), (period, paired)):
        method = IVONConfig(pair_period=each)
        q = fit(target, method, num_steps=2 * averaged, learning_rate=0.02, batch=32, num_chains=16)
        found.append(float(q.stds.log().var(0).mean().sqrt()))
        # 6 elements of 16 chains: 90 degrees of freedom, and 2.5 standard errors of 7 %
        assert found[-1] == pytest.approx(0.5 * math.sqrt(variance / averaged), rel=0.18)
    assert found[0] > 1.15 * found[1]  # the twin: without pairs; a ratio of 1.26 is expected


@pytest.mark.slow
@pytest.mark.statistics
@pytest.mark.parametrize("prior_std", [1.0, 10.0])
def test_minibatches_keep_the_optimum_with_pairs(prior_std: float) -> None:
    target = Regression.with_prior(prior_std)
    best = target.optimum()
    pairs, single = (
        errors(target, fit(target, method, num_steps=10_000, learning_rate=0.01, batch=32), best)
        for method in (IVONConfig(num_draws=2), IVONConfig(pair_period=None))
    )
    assert max(pairs.free_energy, single.free_energy) < 0.02
    assert pairs.std < 0.02  # 3 standard deviations of one std
    assert single.std > 0.02  # the twin: the batch's own error, 2.5 % at 5,000 averaged draws


def test_the_trainer_takes_a_rate_from_the_length_of_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, IVONConfig(), max_steps=16, learning_rate=None)
    made.train()
    assert made.active is not None
    assert made.active.settings.learning_rate == 0.25
    q = made.posterior.approximation
    assert isinstance(q, Gaussian)
    members = q.sample(2, generator("members"))
    assert q.stds.isfinite().all()
    assert not torch.equal(*members)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, 'mean the MAP. Use method="map"'),
        ({"init_std": 0.0}, "init_std must be a finite number > 0, got 0.0"),
        ({"num_draws": 3}, "num_draws must be 1 (one draw) or even (antithetic pairs), got 3"),
        ({"momentum": 1.0}, "momentum must be a finite number >= 0 and < 1, got 1.0"),
        ({"pair_period": 1}, "pair_period must be an integer >= 2, got 1"),
        ({"precision_rate": math.nan}, "precision_rate must be a finite number > 0 and < 1, got nan"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        IVONConfig(**fields)
    assert message in str(error.value)


def test_a_step_longer_than_newtons_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate must be at most 1, got 2: it is a fraction of Newton's step"):
        IVONConfig().build(Problem(1, FlatPrior(), 2.0, 10, 5, {"": (5,)}))


@pytest.mark.parametrize("config", [IVONConfig(), IVONConfig(pair_period=3), IVONConfig(num_draws=4)])
def test_the_stated_cost_is_the_number_of_gradients(config: IVONConfig) -> None:
    """Budgets of ``tune`` and of tables are divided by it."""
    rule, taken = config.build(Problem(1, FlatPrior(), 0.1, 99, 0, {"": (1,)})), 0
    assert isinstance(rule, Rule)
    rngs = chain_generators(0, 1, device="cpu")
    state: Any = rule.init(torch.zeros(1, 1), rngs)
    for number in range(1, 31):
        theta, state = rule.locate(state, rngs)
        anchor = rule.anchor(state)
        taken += 1 if anchor is None else 1 + anchor.shape[1]
        assert taken == math.ceil(number * config.requirements.gradients_per_update)
        gradients = None if anchor is None else -anchor
        state, _ = rule.update(state, Evaluation(torch.zeros(1), -theta, anchor_grad=gradients), 0.1, rngs)
