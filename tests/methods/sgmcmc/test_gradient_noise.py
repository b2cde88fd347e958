from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.gradient_noise import MIRRORED_CHAINS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.training.checks.rows import require_batches
from tests import runs
from tests.methods.sgmcmc.laws import LEARNING_RATE, N, variance_error

SIZES = (64, 192)
SHAPES = {"narrow": (64,), "wide": (192,)}
VARIANCES = (10.0, 25.0)
"""The noise variance of the gradient of U in each tensor: h^2 V = 0.1 and 0.25, with 0.4 injected."""


def run(config: MethodConfig) -> list[Tensor]:
    """Return the draws [4, S, size] of each tensor, on U = N |theta|^2 / 2 with gradient noise of a known variance."""
    rule = config.build(Problem(N, FlatPrior(), LEARNING_RATE, num_steps=2500, burn_in=0, shapes=SHAPES))
    assert isinstance(rule, Rule)
    rngs, noise = [generator("chain", chain) for chain in range(4)], generator("gradient")
    std = torch.cat([torch.full((size,), variance**0.5) for size, variance in zip(SIZES, VARIANCES, strict=True)])
    told = torch.tensor(VARIANCES).expand(4, 2)
    state = rule.init(torch.randn(4, 256, generator=generator("start")) / N**0.5, rngs)
    draws = []
    for step in range(2500):
        gradient = N * state.theta + std * torch.randn(4, 256, generator=noise)
        state, _ = rule.update(state, Evaluation(torch.zeros(4), -gradient, told), LEARNING_RATE, rngs)
        if step >= 100:
            draws.append(state.theta)
    return list(torch.stack(draws, 1).split(SIZES, dim=2))


def law(kind: type[MethodConfig]) -> float:
    """The reference has no noise in the gradient, beta = 0.8 and x = 0.1."""
    euler = 0.2 * 1.9 / (0.1 * 1.85)
    return (euler if kind is SGHMCEulerConfig else 1 / (1 - 0.1 / 3.6)) / N


@pytest.mark.parametrize("kind", [SGHMCConfig, SGHMCEulerConfig])
@pytest.mark.statistics
def test_corrected_variance_is_that_without_gradient_noise(kind: type[Any]) -> None:
    for draws in run(kind(momentum=0.8, correct_gradient_noise=True)):
        error, standard_error = variance_error(draws, law(kind))
        assert 4 * standard_error < 0.03  # 64 coordinates x 4 chains
        assert error < 0.03
    for draws in run(kind(momentum=0.8)):  # the broken twin
        assert variance_error(draws, law(kind))[0] > 0.2


def test_corrected_euler_is_the_noise_of_posteriors_beta() -> None:
    """The noise is epsilon T (2 alpha - epsilon T beta) with sigma = 1 and T = 1 / N; beta is V at that T."""
    epsilon, alpha, num_data, variance = 0.3, 0.5, 7, 4.0
    config = SGHMCEulerConfig(momentum=1 - epsilon * alpha, correct_gradient_noise=True)
    rule = config.build(Problem(num_data, FlatPrior(), epsilon**2, num_steps=1, burn_in=0, shapes={"": (3,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, 3, dtype=torch.float64), [generator("m")])
    state = state._replace(momentum=torch.zeros_like(state.theta))
    told = Evaluation(torch.zeros(1), torch.zeros_like(state.theta), torch.tensor([[variance]], dtype=torch.float64))
    state, _ = rule.update(state, told, epsilon**2, [generator("noise")])
    zeta = torch.randn(3, generator=generator("noise"), dtype=torch.float64)
    theirs = (epsilon / num_data * (2 * alpha - epsilon / num_data * variance)) ** 0.5 * zeta
    assert (state.momentum[0] / num_data**0.5 - theirs).abs().max() < 1e-14


def corrected(
    kind: type[Any], variances: Callable[[int], list[float]], *, num_steps: int, draw_steps: range = range(0)
) -> list[Tensor]:
    """Return the momenta [3] of a chain with tensors of 2 and 1 coordinates, after updates with known V; q = 0.4."""
    shapes = {"noisy": (2,), "quiet": (1,)}
    problem = Problem(N, FlatPrior(), LEARNING_RATE, num_steps, 0, shapes, draw_steps=draw_steps)
    rule = kind(momentum=0.8, correct_gradient_noise=True).build(problem)
    assert isinstance(rule, Rule)
    rngs, momenta = [generator(0)], []
    state = rule.init(torch.zeros(1, 3), rngs)._replace(momentum=torch.zeros(1, 3))
    for step in range(num_steps):
        told = Evaluation(torch.zeros(1), torch.zeros(1, 3), torch.tensor([variances(step)]))
        state, _ = rule.update(state, told, LEARNING_RATE, rngs)
        momenta.append(state.momentum[0])
    return momenta


both = pytest.mark.parametrize("kind", [SGHMCConfig, SGHMCEulerConfig])


@both
def test_too_noisy_a_gradient_gets_no_noise_and_warns_once(kind: type[Any]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        momenta = corrected(kind, lambda step: [41.0 + step, 0.0], num_steps=5)
    assert [str(warning.message).split(",")[0] for warning in found] == [
        f"{kind.name}: the gradient of noisy alone brings noise of h^2 V = 0.41 against 2 gamma h T = 0.4"
    ]
    assert momenta[0][:2].tolist() == [0.0, 0.0]
    assert momenta[0][2] != 0


@both
@pytest.mark.filterwarnings("ignore:.*alone brings noise")
def test_no_noise_left_to_inject_stops_the_run_at_a_draw(kind: type[Any]) -> None:
    for steps in (range(50, 90, 10), range(0)):  # too early to decide, and no draw
        corrected(kind, lambda step: [80.0, 0.0], num_steps=150, draw_steps=steps)
    with pytest.raises(
        ValueError,
        match=r"no noise left to inject in 67% of the coordinates. Over the last 100 updates the gradient of noisy "
        r"alone brings noise of h\^2 V = 0\.8 against 2 gamma h T = 0\.4: the draws would be hotter",
    ):
        corrected(kind, lambda step: [80.0, 0.0], num_steps=150, draw_steps=range(150, 151))


@pytest.mark.parametrize(
    "variances",
    [
        lambda step: [120.0 if step % 3 == 0 else 0.0, 0.0],  # 40 in the mean
        lambda step: [0.0, 400.0],  # of a third of the coordinates
        lambda step: [400.0 * (step < 100), 0.0],  # while the chain is on its way: 0.05 is left of it
        lambda step: [50.0, 50.0],  # 1.25 q, which estimates cannot distinguish from q
    ],
)
@pytest.mark.filterwarnings("ignore:.*alone brings noise")
def test_noise_that_passes_or_may_be_the_estimates_own_does_not(variances: Callable[[int], list[float]]) -> None:
    corrected(SGHMCConfig, variances, num_steps=400, draw_steps=range(400, 401))


@pytest.mark.parametrize(
    ("config", "injected_over_squared_step"),
    [
        (SGLDConfig(), 2 * N / 0.1),
        (SGHMCConfig(momentum=0.8), 2 * 0.2 * N / 0.1),
        (SGHMCEulerConfig(momentum=0.8), 2 * 0.2 * N / 0.1),
        (SGNHTConfig(momentum=0.8), 2 * 0.2 * N / 0.1),
        (BAOABConfig(momentum=0.8), (1 - 0.64) * N / 0.1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_sampler_reports_its_noise_over_the_gradients(
    config: MethodConfig, injected_over_squared_step: float
) -> None:
    rule = config.build(Problem(N, FlatPrior(), 0.1, num_steps=1, burn_in=0, shapes={"a": (3,), "b": (1,)}))
    assert isinstance(rule, Rule)
    rngs = [generator(0)]
    state = rule.init(torch.zeros(1, 4), rngs)
    told = Evaluation(torch.zeros(1), torch.zeros(1, 4), torch.tensor([[8.0, 16.0]]))
    ratio = rule.update(state, told, 0.1, rngs)[1]["noise_ratio"]
    assert ratio.tolist() == pytest.approx([injected_over_squared_step / 10])  # V = (3 * 8 + 16) / 4
    assert rule.update(state, told, 0.0, rngs)[1]["noise_ratio"].isinf().all()
    assert "noise_ratio" not in rule.update(state, told._replace(grad_variance=None), 0.1, rngs)[1]


def test_one_gradient_an_update_has_no_measurable_noise(tmp_path: Any) -> None:
    config = SGHMCConfig(correct_gradient_noise=True)
    with pytest.raises(ValueError, match=r"at least 2 \(gradient_accumulation_steps x .*\), got 1: split"):
        runs.trainer(tmp_path, config)
    require_batches(config, 2)  # of two processes that share a chain, say
    with pytest.raises(ValueError, match=r"sghmc needs the variance of the gradient .* got batches_per_step=1: give"):
        sample(lambda theta, batch: theta.sum(1), torch.ones(1, 1), config, num_steps=2, learning_rate=0.1)
    with pytest.raises(ValueError, match="measure_gradient_noise must be true or false, got 'yes'"):
        SGLDConfig(measure_gradient_noise="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_chains", "given", "expected"),
    [(4, None, False), (MIRRORED_CHAINS, None, True), (2, True, True), (32, False, False)],
)
def test_pairs_of_chains_are_mirrored_from_eight_on(num_chains: int, given: bool | None, expected: bool) -> None:
    assert SGHMCConfig(num_chains=num_chains, mirrored=given).requirements.mirrored_chains is expected


def test_mirrored_must_be_a_flag() -> None:
    with pytest.raises(ValueError, match="mirrored must be true or false, got 1"):
        SGHMCConfig(mirrored=1)  # type: ignore[arg-type]
