"""Chains that take smaller steps where heat or noise grows along the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from hf_bayes.methods.sgmcmc import step_control
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.whitening import MAX_STEP
from tests.methods.sgmcmc.gaussian_runs import (
    CURVATURE,
    PRIOR_STD,
    GaussianData,
    StiffElsewhere,
    every_update,
    relative_variances,
    run_of,
)


@pytest.mark.parametrize("guard", ["heat", "growth", None])
def test_a_chain_that_heats_takes_smaller_steps(monkeypatch: pytest.MonkeyPatch, guard: str | None) -> None:
    """Heat shows a step that is too large, and so does a gradient that changes much within one step."""
    if guard != "heat":
        monkeypatch.setattr(step_control, "MAX_HEAT", math.inf)
    if guard != "growth":
        monkeypatch.setattr(step_control, "MAX_GROWTH", math.inf)
    run = run_of(SGHMCConfig(), StiffElsewhere(), steps=800)
    if guard is None:  # the broken twin
        with pytest.raises(FloatingPointError):
            every_update(run, 800)
        return
    law = every_update(run, 800)[-1]["kinetic_temperature_law"]
    # h^2 lambda has to come below 2 (1 + beta); the heat that is left is below the guard's mark, 1 + 6 sqrt(2 / 80)
    stable = (3.8 / 400) ** 0.5
    least = {"heat": 0.2 * stable, "growth": 0.3 * MAX_STEP / 20}  # MAX_STEP / 20 is right for this curvature
    assert bool((run.state.step_size < stable).all())
    assert bool((run.state.step_size > least[guard]).all())
    assert bool((run.state.whitened_momentum.square().mean(1) < 1.95 * law).all())
    assert float((400 * CURVATURE + PRIOR_STD**-2).sqrt().mul(run.theta).abs().max()) < 20


class NoisierAway(GaussianData):
    """Noise that is 11 times as large at a typical draw of the posterior as at its mode."""

    def __call__(self, theta: Tensor, **options: Any) -> Any:
        away = (theta.square() * (CURVATURE + PRIOR_STD**-2))[:, :60].mean(1, keepdim=True)
        exact = -CURVATURE * theta
        found = super().__call__(theta, **options)
        return found._replace(grad_log_lik=exact + (1 + 10 * away).sqrt() * (found.grad_log_lik - exact))


@pytest.mark.statistics
@pytest.mark.parametrize("guarded", [True, False])
def test_noise_that_grows_along_the_way_shrinks_the_step(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """A step size for the noise of the mode heats by 11 times what is allowed, and heat makes noise."""
    monkeypatch.setattr(step_control, "MAX_HEAT", math.inf)  # three quarters of the directions are heated: it sees them
    if not guarded:  # the broken twin
        monkeypatch.setattr(step_control, "MAX_GROWTH", math.inf)
    run = run_of(SGHMCConfig(heating=0.05, whitening="diagonal"), NoisierAway(2.0), steps=6000)
    growth = every_update(run, 6000)[-1]["noise_growth"]
    stiff, softer, *_ = relative_variances(run)
    # V is 22, and h was last set when V was at least half of that: a relaxation of 110 to 220 updates. The mean over
    # 4 chains x 4,500 / 220 x 20 directions has a standard error of 3.5 %; heating is 5 to 10 %
    if guarded:
        assert growth.tolist() == pytest.approx([11.0] * 4, rel=0.5)
        assert 0.9 < stiff < 1.2
        assert 0.9 < softer < 1.2
    else:
        assert min(stiff, softer) > 2
