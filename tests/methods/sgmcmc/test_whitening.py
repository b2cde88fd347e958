"""Samplers that find their own step size, on Gaussians whose curvature and gradient noise are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.run import Run
from hf_bayes.core.rng import chain_generators
from hf_bayes.core.types import Evaluation
from hf_bayes.methods.sgmcmc import step_control, whitening
from hf_bayes.methods.sgmcmc.covariance_roots import DiagonalRoots
from hf_bayes.methods.sgmcmc.gradient_noise import HEATING, HEATING_OF_TEMPERED, LangevinConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.whitening import MAX_STEP, num_measured
from tests.methods.sgmcmc import gaussian_runs
from tests.methods.sgmcmc.gaussian_runs import (
    CURVATURE,
    PRIOR_STD,
    SAMPLERS,
    GaussianData,
    StiffElsewhere,
    every_update,
    finished,
    relative_variances,
    run_of,
)
from tests.objectives.test_curvature_memory import Live


@pytest.mark.statistics
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_all_directions_have_the_posteriors_variance(sampler: type[LangevinConfig], temperature: float) -> None:
    run = finished(sampler(temperature=temperature))
    # about 4 chains x 3,000 updates / relaxation (2.5 to 25 updates) x 20 directions: 1.2 % to 4 %; h^2 costs 1 %
    assert relative_variances(run) == pytest.approx([temperature] * 4, rel=0.12)


@pytest.mark.statistics
@pytest.mark.parametrize("mirrored", [True, False])
def test_mirrored_chains_cancel_the_error_of_their_mean(mirrored: bool) -> None:
    run = run_of(SGHMCConfig(), GaussianData(0.0, range(4), common=False), steps=400)
    run.rngs = list(chain_generators(0, 4, mirrored=mirrored))
    for _ in range(400):
        run.update([None], 1.0)
    draws = torch.stack(run.draws, 1)
    error = float((draws[0] + draws[1]).square().mean() / draws[:2].square().mean())
    # images around 0 have the sum 0, up to rounding; of two independent chains the ratio is 2
    assert error < 1e-12 if mirrored else error > 1


@pytest.mark.statistics
def test_without_the_transposed_root_the_variances_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin."""
    monkeypatch.setattr(DiagonalRoots, "transposed", lambda self, packed, vectors: packed.square() * vectors)
    run = finished(SGHMCConfig(whitening="diagonal"))
    assert max(abs(value - 1) for value in relative_variances(run)) > 0.5


@pytest.mark.statistics
def test_gradient_noise_heats_as_much_as_it_was_allowed_to() -> None:
    run = finished(SGHMCConfig(heating=0.2, whitening="diagonal"), noise=30.0, steps=24000)
    stiff, softer, *_ = relative_variances(run)
    # the relaxation is .1 / (2 * .2 * .1 / 30) = 75 updates: 4 x 18,000 / 150 x 20 pairs, 1.5 %
    assert stiff == pytest.approx(1.2, rel=0.06)
    assert softer == pytest.approx(1.2, rel=0.06)


def temperatures(run: Run[Any], steps: int) -> dict[str, float]:
    """Return means of the two kinetic temperatures over their law, over further updates."""
    found: dict[str, list[Tensor]] = {"kinetic_temperature": [], "kinetic_temperature_informed": []}
    for _ in range(steps):
        info = run.update([None], 1.0).info
        for name, values in found.items():
            if name in info:
                values.append(info[name] / info["kinetic_temperature_law"])
    assert len(found["kinetic_temperature_informed"]) == steps // whitening.INFORMED_PERIOD
    return {name: float(torch.stack(values).mean()) for name, values in found.items()}


@pytest.mark.statistics
@pytest.mark.parametrize("heating", [0.2, 1.5])
def test_heat_is_measured_where_the_data_outweigh_the_prior(heating: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the directions have no gradient noise, and H = 40 has 9 % less: the mean over all is too low."""
    monkeypatch.setattr(step_control, "MAX_HEAT", 100.0)  # the guard would shrink the step
    run = run_of(SGHMCConfig(heating=heating, whitening="diagonal"), GaussianData(30.0), steps=5000)
    for _ in range(1000):
        run.update([None], 1.0)
    found = temperatures(run, 4000)
    # 4 chains x 500 looks x 60 directions, correlated over 10 updates: 0.5 %; V is measured to 8 % of the heating
    informed = 1 + heating * (1 + 1 / 1.004 + 1 / 1.1) / 3
    assert found["kinetic_temperature_informed"] == pytest.approx(informed, rel=0.02 + 0.08 * heating)
    assert found["kinetic_temperature"] < 1 + 0.85 * (found["kinetic_temperature_informed"] - 1)


def test_the_step_size_is_that_of_the_allowed_heating() -> None:
    config = SGHMCConfig(heating=0.05, momentum=0.8, temperature=0.5, whitening="diagonal")
    run, infos = run_of(config, GaussianData(25.0), steps=1000), []
    for _ in range(30):
        infos.append(run.update([None], 1.0).info)
    (found,) = [info for info in infos if "gradient_variance" in info]
    # of directions with H > tau: whitened variances 25 H / (H + tau) = 25, 24.9, 22.7; 10 pairs x 60 directions
    variance = 25 * (1 + 1 / 1.004 + 1 / 1.1) / 3
    assert found["gradient_variance"].tolist() == pytest.approx([variance] * 4, rel=4 * math.sqrt(2 / (10 * 60)))
    # of all directions it would be 18.4
    assert float(found["gradient_variance"].mean()) == pytest.approx(variance, rel=4 * math.sqrt(2 / (40 * 60)))
    expected = (2 * 0.05 * 0.5 * 0.2 / found["gradient_variance"]).sqrt()
    torch.testing.assert_close(found["step_size"], expected)
    torch.testing.assert_close(found["relaxation"], 0.2 / expected.square())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, HEATING),
        ({"temperature": 2.0}, HEATING),
        ({"temperature": 0.99}, HEATING_OF_TEMPERED),
        ({"temperature": 0.1, "heating": 0.2}, 0.2),
        ({"heating": 0.3}, 0.3),
    ],
)
def test_more_heating_is_allowed_below_temperature_one(settings: dict[str, float], expected: float) -> None:
    assert SGHMCConfig(**settings).allowed_heating == expected


def test_exact_gradients_get_the_largest_step() -> None:
    run = run_of(SGHMCConfig(), GaussianData(), steps=100)
    for _ in range(30):
        run.update([None], 1.0)
    assert run.state.step_size.tolist() == pytest.approx([MAX_STEP] * 4)


def test_chains_stand_still_while_their_noise_is_measured() -> None:
    objective = GaussianData(1.0)
    run = run_of(SGHMCConfig(), objective, steps=200)
    start, measured = run.theta.clone(), num_measured(200)
    for _ in range(measured):
        run.update([None], 1.0)
        assert torch.equal(run.theta, start)
    assert objective.passes == 4
    run.update([None], 1.0)
    assert bool((run.theta != start).all())
    assert objective.passes == 4


def test_a_chain_does_not_depend_on_the_others() -> None:
    config = SGHMCConfig(num_chains=4)
    together = finished(config, noise=9.0, steps=100)
    alone = finished(config, noise=9.0, steps=100, chains=range(2, 3))
    assert torch.equal(torch.stack(alone.draws), torch.stack(together.draws)[:, 2:3])


def test_the_learning_rate_is_a_factor_of_the_squared_step() -> None:
    """An update is theta - factor h^2 (H + tau)^-1 grad U at T -> 0 and beta = 0."""
    run = run_of(SGLDConfig(temperature=1e-20, heating=1e20, whitening="diagonal"), GaussianData(), steps=100)
    start = torch.ones_like(run.theta)
    run._start = start
    for _ in range(num_measured(100)):
        run.update([None], 1.0)
    run.update([None], 0.25)
    torch.testing.assert_close(run.theta, (1 - 0.25 * MAX_STEP**2) * start, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("steps", "measured"), [(20, 4), (200, 4), (300, 6), (500, 10), (5000, 24)])
def test_measuring_takes_a_fiftieth_of_a_run(steps: int, measured: int) -> None:
    assert num_measured(steps) == measured


@pytest.mark.statistics
def test_a_control_variate_leaves_the_target_as_it_is() -> None:
    """Noise that is the same at the anchor cancels. So the step is the largest one."""
    run = finished(SGHMCConfig(), noise=30.0, common=True)
    assert run.state.step_size.tolist() == pytest.approx([MAX_STEP] * 4)
    assert relative_variances(run) == pytest.approx([1.0] * 4, rel=0.12)  # as without noise


@pytest.mark.statistics
@pytest.mark.parametrize("sound", [True, False])
def test_an_anchor_off_the_mode_moves_no_chain(monkeypatch: pytest.MonkeyPatch, sound: bool) -> None:
    """The anchor is two standard deviations away. The broken twin leaves the gradient of all rows there out."""

    def without_all_rows(self: Any, state: Any, evaluation: Evaluation) -> Tensor:
        return evaluation.grad_log_lik - evaluation.anchor_grad

    if not sound:
        monkeypatch.setattr(whitening.WhitenedSampler, "_corrected", without_all_rows)
    run = run_of(SGHMCConfig(), GaussianData(30.0, common=True), steps=400)
    std = (CURVATURE + PRIOR_STD**-2).rsqrt()
    run._start = 2 * std.expand_as(run.theta)
    every_update(run, 400)
    mean = float((torch.stack(run.draws)[-20:] / std)[:, :, :40].mean())
    # of 160 elements at 200 updates, about 80 relaxations: a standard error of 1 %
    assert mean == pytest.approx(0.0 if sound else 2.0, abs=0.1)


def test_the_anchor_is_evaluated_only_where_it_pays() -> None:
    for common in (True, False):
        objective = GaussianData(30.0, common=common)  # the slope's standard error is sqrt(2 * 30 / (20 * 60)) = .22
        found = every_update(run_of(SGHMCConfig(), objective, steps=1000), 60)[num_measured(1000)]
        assert found["trial_fits"].tolist() == [1.0] * 4
        assert found["trial_anchored"].tolist() == [float(common)] * 4
        assert objective.anchors == (60 if common else num_measured(1000))


@pytest.mark.parametrize("stop", [2, num_measured(100), 20])
def test_a_run_resumes_bitwise_in_the_trial_and_after_it(stop: int) -> None:
    whole, part = (run_of(SGHMCConfig(), GaussianData(30.0, common=True), steps=100) for _ in range(2))
    every_update(whole, 40)
    every_update(part, stop)
    objective = GaussianData(30.0, common=True)
    objective.rngs = part.objective.rngs  # the data go on, too
    resumed = run_of(SGHMCConfig(), objective, steps=100)
    resumed.load_state_dict(part.state_dict(), stop)
    every_update(resumed, 40 - stop)
    assert torch.equal(resumed.theta, whole.theta)


def test_chains_start_at_draws_of_an_approximation_that_fits() -> None:
    run = run_of(SGHMCConfig(), GaussianData(), steps=400)
    every_update(run, num_measured(400) + 1)
    # one step of h = .2 away from the draw, whose whitened distance from theta_0 is about sqrt(80)
    whitened = run.theta * (CURVATURE + PRIOR_STD**-2).sqrt()
    assert whitened.square().mean(1).tolist() == pytest.approx([1.0] * 4, abs=6 * math.sqrt(2 / 80))


def test_chains_start_at_theta_0_where_the_curvature_is_another() -> None:
    run = run_of(SGHMCConfig(), StiffElsewhere(), steps=400)
    found = every_update(run, num_measured(400) + 1)[-1]
    assert bool((found["trial_slope"] > 100).all())
    assert found["trial_fits"].tolist() == [0.0] * 4
    assert float(run.theta.abs().max()) < 0.5


def test_a_burn_in_too_short_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from 4 minibatches in its burn-in, which has 3 updates .* train longer, ra"):
        run_of(SGHMCConfig(), GaussianData(), steps=15)


@pytest.mark.parametrize("is_anchored", [False, True])
def test_an_update_takes_little_memory_beside_the_state(is_anchored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors in numbers per parameter, at the peak of each update and after it."""
    monkeypatch.setattr(gaussian_runs, "CURVATURE", CURVATURE.repeat(100))  # the numbers of a chain count for nothing
    unit, peaks, kept = 4 * 100 * CURVATURE.nbytes, [], []
    with Live() as live:
        run = run_of(SGHMCConfig(whitening="diagonal"), GaussianData(30.0, common=is_anchored), steps=400)
        for _ in range(num_measured(400) + 3):
            live.peak = live.now
            run.update([None], 1.0)
            peaks.append(live.peak / unit)
            kept.append(live.now / unit)
    assert run.state is not None
    assert bool(run.state.choices[0, 1] > 0) == is_anchored
    # theta (theta_0, the start), root, direction, and the gradient; in every other update the two of a pair
    assert kept[:7] == pytest.approx([6, 4] * 3 + [6], abs=0.2)
    assert max(peaks[:8]) < 13.5
    # of the sampler theta, v and momentum; theta_0, root, the gradients of the objective and of the last update
    assert kept[8:] == pytest.approx([8 if is_anchored else 7] * 3, abs=0.2)
    assert max(peaks[8:]) < 16.5
