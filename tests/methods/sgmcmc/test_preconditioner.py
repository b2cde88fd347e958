from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.methods.sgmcmc.laws import stationary_moments, variance_error

SIZES = (3, 2, 4)
NUM_DATA, RATE = 5, 0.2


def rule_of(config: SGHMCConfig, *, sizes: tuple[int, ...] = SIZES, rate: float = RATE, **changes: Any) -> Rule:
    shapes = {str(index): (size,) for index, size in enumerate(sizes)}
    return config.build(Problem(NUM_DATA, FlatPrior(), rate, num_steps=200, burn_in=0, shapes=shapes, **changes))


def layerwise(batches: int, period: int | None = None, **changes: Any) -> SGHMCConfig:
    return SGHMCConfig(
        preconditioner="layerwise", preconditioner_batches=batches, preconditioner_period=period, **changes
    )


def gradients(count: int, scales: tuple[float, ...] = (1.0, 10.0, 0.5)) -> Tensor:
    """Return gradients of U [count, 2, 9] for two chains, with a different size in each tensor."""
    per_element = torch.cat([torch.full((size,), scale) for size, scale in zip(SIZES, scales, strict=True)])
    return torch.randn(count, 2, 9, generator=generator("gradients"), dtype=torch.float64) * per_element


def begin(rule: Rule) -> tuple[Any, list[torch.Generator]]:
    rngs = [generator("chain", chain) for chain in range(2)]
    return rule.init(torch.ones(2, 9, dtype=torch.float64), rngs), rngs


def advance(rule: Rule, state: Any, gradient: Tensor, rngs: list[torch.Generator]) -> Any:
    return rule.update(state, Evaluation(torch.zeros(2), -gradient), RATE, rngs)[0]


def test_masses_are_estimated_per_tensor_while_nothing_moves() -> None:
    rule = rule_of(layerwise(7, 100))
    state, rngs = begin(rule)
    start, noise = state, rngs[0].get_state()
    for gradient in gradients(7):
        assert torch.equal(state.mass, torch.ones(2, 3))
        state = advance(rule, state, gradient, rngs)
    assert torch.equal(state.theta, start.theta)
    assert torch.equal(state.momentum, start.momentum)
    assert torch.equal(rngs[0].get_state(), noise)
    for chain in range(2):
        sigmas = []
        for tensor in range(3):  # the listing, line by line
            value, first = 0.0, sum(SIZES[:tensor])
            for gradient in gradients(7):
                part = gradient[chain, first : first + SIZES[tensor]] / NUM_DATA
                value += (part @ part).item() / (7 * SIZES[tensor])
            sigmas.append(math.sqrt(1e-7 + value))
        assert state.mass[chain].tolist() == pytest.approx([sigma / min(sigmas) for sigma in sigmas], rel=1e-12)


def test_updates_between_estimates_are_preconditioned_sghmc() -> None:
    rule = rule_of(layerwise(2, 6, momentum=0.7, temperature=0.6))
    state, rngs = begin(rule)
    noise = [generator("chain", chain) for chain in range(2)]
    momentum = math.sqrt(0.6) * torch.stack([torch.randn(9, generator=rng, dtype=torch.float64) for rng in noise])
    theta, mass = state.theta, torch.ones(2, 9, dtype=torch.float64)
    h, friction = math.sqrt(RATE / NUM_DATA), 0.3 * math.sqrt(NUM_DATA / RATE)
    for step, gradient in enumerate(gradients(18)):
        state = advance(rule, state, gradient, rngs)
        if step % 6 == 1:  # an estimate is done: m' = M'^(1/2) M^(-1/2) m
            new = state.mass.repeat_interleave(torch.tensor(SIZES), dim=1)
            momentum, mass = (new / mass).sqrt() * momentum, new
        if step % 6 >= 2:
            white = torch.stack([torch.randn(9, generator=rng, dtype=torch.float64) for rng in noise])
            shake = math.sqrt(2 * friction * h * 0.6) * mass.sqrt() * white
            momentum = (1 - h * friction) * momentum - h * gradient + shake
            theta = theta + h * momentum / mass
        assert (state.theta - theta).abs().max() < 1e-12
        assert (state.momentum - momentum / mass.sqrt()).abs().max() < 1e-12


@pytest.mark.parametrize("mass", [1.0, 4.0])
@pytest.mark.statistics
def test_stationary_moments_have_lambda_over_m_for_lambda(mass: float) -> None:
    temperature, curvature, h, beta = 0.7, 1.7, 0.4, 0.8
    config = layerwise(1, 100, momentum=beta, temperature=temperature)
    got = stationary_moments(config, step_size=h, curvature=curvature, mass=mass)
    x = h**2 * curvature / mass
    assert got.position == pytest.approx(temperature / curvature / (1 - x / (2 * (1 + beta))), rel=1e-9)
    assert got.momentum == pytest.approx(2 * temperature / (1 + beta - x / 2), rel=1e-9)


CURVATURES, VARIANCES = (5.0, 125.0), (10.0, 100.0)
"""The curvatures of U in two tensors, and the variances of the noise in its gradient."""


def draws_of(config: SGHMCConfig, variances: tuple[float, float] = (0.0, 0.0)) -> tuple[list[Tensor], list[Tensor]]:
    """Return the draws [4, S, 256] of each tensor from one run of 1500 updates, and the masses [4]."""
    curvature, noise_std = (
        torch.cat([torch.full((256,), value) for value in values])
        for values in (CURVATURES, [variance**0.5 for variance in variances])
    )
    rule = rule_of(config, sizes=(256, 256), rate=0.05)
    rngs, noise = [generator("chain", chain) for chain in range(4)], generator("gradient")
    state = rule.init(torch.randn(4, 512, generator=generator("start")) / curvature.sqrt(), rngs)
    draws = []
    for step in range(1500):
        gradient = curvature * state.theta + noise_std * torch.randn(4, 512, generator=noise)
        state, _ = rule.update(state, Evaluation(torch.zeros(4), -gradient), 0.05, rngs)
        if step >= 100:
            draws.append(state.theta)
    mass = getattr(state, "mass", torch.ones(4, 2))
    return list(torch.stack(draws, 1).split(256, dim=2)), list(mass.double().unbind(1))


def law(tensor: int, mass: Tensor, variance: float) -> float:
    """Return the documented E theta^2 with lambda / M for lambda and V / M for V, as a mean over chains."""
    h_squared, beta = 0.05 / NUM_DATA, 0.9
    temperature = 1 + h_squared * variance / mass / (2 * (1 - beta))
    x = h_squared * CURVATURES[tensor] / mass
    return float((temperature / CURVATURES[tensor] / (1 - x / (2 * (1 + beta)))).mean())


@pytest.mark.parametrize("variances", [(0.0, 0.0), VARIANCES], ids=["exact gradients", "minibatch noise"])
@pytest.mark.statistics
def test_the_law_is_kept_where_tensors_have_different_curvatures(variances: tuple[float, float]) -> None:
    draws, masses = draws_of(layerwise(8, 1500), variances)
    assert masses[0].tolist() == [1.0] * 4
    assert (masses[1] > 3).all()  # gradients differ by a factor of 4 to 5 on the target
    for tensor, (drawn, mass) in enumerate(zip(draws, masses, strict=True)):
        error, standard_error = variance_error(drawn, law(tensor, mass, variances[tensor]))
        assert 4 * standard_error < 0.03
        assert error < 0.03
    plain, _ = draws_of(SGHMCConfig(), variances)  # the broken twin: no preconditioner
    assert variance_error(plain[1], law(1, masses[1], variances[1]))[0] > 0.1


def test_an_estimate_begins_with_the_run_and_with_each_cycle() -> None:
    rule = rule_of(layerwise(3), draw_steps=range(25, 46, 20))  # cycles begin at updates 5 and 25
    state, rngs = begin(rule)
    still = []
    for step, gradient in enumerate(gradients(45)):
        moved = advance(rule, state, gradient, rngs)
        still += [step] if torch.equal(moved.theta, state.theta) else []
        state = moved
    assert still == [0, 1, 2, 5, 6, 7, 25, 26, 27]


def test_an_estimate_that_leaves_no_update_to_move_in_is_refused() -> None:
    for config, draws in ((layerwise(4, 4), range(50, 51, 50)), (layerwise(32), range(20, 101, 20))):
        with pytest.raises(ValueError, match=r"estimated from \d+ minibatches every \d+ updates, which leaves none"):
            rule_of(config, draw_steps=draws)


@pytest.mark.parametrize(("batches", "warned"), [(10, False), (11, True)])
def test_an_estimate_that_takes_most_of_a_cycle_is_warned_of(
    batches: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    rule_of(layerwise(batches), draw_steps=range(20, 101, 20))
    said = [str(warning.message) for warning in recwarn]
    assert [words.startswith("the preconditioner's estimate takes 11 of every 20 updates") for words in said] == (
        [True] * warned
    )


@pytest.mark.parametrize(
    "field", [{"preconditioner": "adam"}, {"preconditioner_batches": 0}, {"preconditioner_period": 0}]
)
def test_other_values_are_refused(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ValueError, match=f"sghmc: {name} must be"):
        SGHMCConfig(**field)


@pytest.mark.models
def test_the_trainer_resumes_within_an_estimate_of_the_masses(tmp_path: Any) -> None:
    config = layerwise(3, num_chains=2, draws_per_chain=2, burn_in=0)
    whole = runs.trainer(tmp_path, config, max_steps=10, save_strategy="steps", save_steps=6)
    whole.train()
    mass = whole.run.state.mass
    assert mass.shape == (2, len(whole.bayesian.layout.names))
    assert mass.amin(1).tolist() == [1.0, 1.0]
    assert mass.amax() > 1.5
    assert all(0 < share <= 1 for share in whole.posterior.config.diagnostics["kinetic_share"])
    resumed = runs.trainer(tmp_path, config, max_steps=10)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert runs.equal(whole.posterior.approximation, resumed.posterior.approximation)
