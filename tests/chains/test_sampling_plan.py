from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.chains.sampling_plan import update_fraction_of
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from tests.chains.bowl import bowl, run


def test_one_theta_is_the_centre_of_jittered_starts() -> None:
    centre = torch.tensor([30.0, 40.0])
    spread = []
    for jitter in (0.0, 0.1, 0.2):
        config = SGLDConfig(num_chains=6, init_jitter=jitter)
        draws = run(theta=centre, method=config, num_steps=1, learning_rate=1e-12).draws[:, 0]
        assert draws.shape == (6, 2)
        spread.append(draws - centre)
    assert spread[0].abs().max() < 1e-4
    assert len(spread[1].unique(dim=0)) == 6
    assert torch.allclose(spread[2], 2 * spread[1], atol=1e-4)
    assert 0.4 < spread[1].std() / (0.1 * 25 * math.sqrt(2)) < 1.6  # 12 normals: sd of their sd is 0.2


def test_a_zero_theta_is_jittered_on_the_scale_of_one_hundredth() -> None:
    config = SGLDConfig(num_chains=64, init_jitter=0.5)
    draws = run(theta=torch.zeros(64), method=config, num_steps=1, learning_rate=1e-12).draws
    assert draws.std() == pytest.approx(0.005, rel=0.05)


def test_rows_of_theta_are_the_starts_and_override_num_chains() -> None:
    with pytest.warns(UserWarning, match=r"theta has 7 rows, .* so num_chains=2 of sgld is not used"):
        assert run(theta=torch.ones(7, 3), method=SGLDConfig(num_chains=2)).draws.shape == (7, 10, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(theta=torch.ones(7, 3))
        run(theta=torch.ones(7, 3), method=SGLDConfig(num_chains=7))


def test_a_constant_schedule_is_the_number() -> None:
    assert torch.equal(run(learning_rate=lambda step: 0.1, method=SGHMCConfig()).draws, run(method=SGHMCConfig()).draws)


def test_a_schedule_starts_at_step_0_and_its_peak_sets_friction() -> None:
    asked = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.1 / (1 + abs(step - 4))

    info = run(learning_rate=schedule, method=SGHMCConfig(momentum=0.8)).info
    assert asked == list(range(10))
    # beta_t = 1 - 0.2 sqrt(l_t / peak)
    decay = [1 - 0.2 * math.sqrt(1 / (1 + abs(step - 4))) for step in range(10)]
    assert info["kinetic_temperature_law"][:, 0].tolist() == pytest.approx([2 / (1 + b) for b in decay], rel=1e-6)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf, None])
def test_a_schedule_value_that_is_not_positive_is_refused(bad: object) -> None:
    calls = []

    def energy(theta: Tensor, batch: object) -> Tensor:
        calls.append(1)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=r"learning_rate must be > 0 at every step, the schedule gives .* at step 7 "):
        run(energy, learning_rate=lambda step: bad if step == 7 else 0.1)
    assert not calls  # before the first update


@pytest.mark.parametrize("method", [MetropolisConfig(), HMCConfig()])
def test_exact_kernels_refuse_batches(method: MethodConfig) -> None:
    with pytest.raises(ValueError, match=rf"{method.name} is exact only if every energy sees all data, got batches"):
        run(batches=[1, 2], method=method)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "sgld"}, r"method must be a config, an instance of a class in hf_bayes\.METHODS, got 'sgld'"),
        ({"method": SGLDConfig}, r"method must be a config, an instance of a class in hf_bayes\.METHODS, got <class"),
        ({"method": SGLDConfig(prior_std=2.0)}, r"sample adds no prior, but sgld sets prior_std=2.0: put -log p"),
        ({"method": SGLDConfig(prior_std={".*": 1.0})}, r"sample adds no prior, but sgld sets prior_std={'"),
        ({"method": SGLDConfig(prior_scale=2.0)}, r"sample adds no prior, but sgld sets prior_scale=2.0"),
        ({"method": SGLDConfig(prior="laplace")}, r"sample adds no prior, but sgld sets prior='laplace'"),
        ({"method": SGLDConfig(prior_mean="initial")}, r"sample adds no prior, but sgld sets prior_mean='initial'"),
        ({"method": SGLDConfig(temper="likelihood")}, r"got temper='likelihood', expected 'posterior'"),
        ({"method": SGLDConfig(burn_in=5)}, r"would ignore burn_in=5 of sgld: leave it out of the config"),
        ({"method": SGLDConfig(thin=5)}, r"would ignore thin=5 of sgld"),
        ({"method": SGLDConfig(draws_per_chain=5)}, r"would ignore draws_per_chain=5 of sgld"),
        (
            {"method": MCDropoutConfig(targets="q_proj")},
            r"one tensor without a name, but mc_dropout sets targets='q_proj', .* or give theta as a dict",
        ),
        ({"method": SGLDConfig(warm_start_steps=3)}, r"warm_start_steps=3 count as burn-in, which is 0 of 10 updates"),
        ({"num_steps": 0}, r"num_steps must be an integer >= 1, got 0"),
        ({"num_steps": 10.0}, r"num_steps must be an integer >= 1, got 10.0"),
        ({"learning_rate": 0.0}, r"learning_rate must be a finite number > 0, got 0.0"),
        ({"learning_rate": -1}, r"learning_rate must be a finite number > 0, got -1"),
        ({"learning_rate": "0.1"}, r"learning_rate must be a finite number > 0, got '0.1'"),
        ({"num_data": 0}, r"num_data must be a finite number > 0, got 0"),
        ({"num_data": math.nan}, r"num_data must be a finite number > 0, got nan"),
        ({"burn_in": -1}, r"burn_in must be a fraction in \[0, 1\) or a number of updates, got -1"),
        ({"burn_in": 2.5}, r"burn_in must be a fraction .*, got 2.5"),
        ({"burn_in": math.nan}, r"burn_in must be a fraction .*, got nan"),
        ({"burn_in": math.inf}, r"burn_in must be a fraction .*, got inf"),
        ({"burn_in": 10}, r"would collect 0 draws: 10 updates, the first 10 of them burn-in"),
        ({"thin": 11}, r"would collect 0 draws: 10 updates, .* one draw per 11"),
        ({"thin": 0}, r"thin must be an integer >= 1, got 0"),
        ({"seed": None}, r"seed must be an integer, got None"),
        ({"seed": 0.5}, r"seed must be an integer, got 0.5"),
        ({"batches": 3}, r"batches must be an iterable of batches or a function that returns one, got 3"),
        ({"batches": lambda: None}, r"a function that returns one, got a function that returned None"),
        ({"theta": [[1.0, 2.0]]}, r"theta must be a tensor \[M, d\] or \[d\], or a dict.*, got list"),
        ({"theta": torch.ones(2, 3, 4)}, r"theta must be \[M, d\] or \[d\] .*, got shape \[2, 3, 4\]"),
        ({"theta": torch.ones(0, 3)}, r"theta must be \[M, d\] or \[d\] .*, got shape \[0, 3\]"),
        ({"theta": torch.ones(2, 3, dtype=torch.bfloat16)}, r"theta must be float32 or float64, got torch.bfloat16"),
        ({"theta": torch.ones(2, 3, dtype=torch.int64)}, r"theta must be float32 or float64, got torch.int64"),
        ({"theta": torch.tensor([[1.0, math.nan]])}, r"theta has non-finite elements"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_update(changes: dict[str, Any], message: str) -> None:
    calls = []

    def energy(theta: Tensor, batch: object) -> Tensor:
        calls.append(1)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=message):
        run(energy, **changes)
    assert not calls


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (
            lambda theta, batch: theta.square().sum(),
            r"tensor of shape \[2\] for theta \[2, 3\]; got \[\] of .*: sum over",
        ),
        (lambda theta, batch: theta.square(), r"tensor of shape \[2\] for theta \[2, 3\]; got \[2, 3\] of"),
        (None, r"energy must be a function of \(theta, batch\), got None"),
        (lambda theta, batch: theta.sum(1).long(), r"one real number per chain, a floating-point .* of torch.int64"),
        (
            lambda theta, batch: torch.ones(2, requires_grad=True),
            r"energy must depend on theta: .* a gradient, but of other tensors only",
        ),
        (
            lambda theta: bowl(theta, None),
            r"energy\(theta, batch\), .* a function of \(theta\) \(too many",
        ),
        (lambda theta, batch: 1.0, r"one real number per chain, .* got float"),
        (lambda theta, batch: bowl(theta.detach(), batch), r"energy must be differentiable in theta"),
    ],
)
def test_energies_of_the_wrong_kind_are_refused(energy: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(energy)


def test_a_number_of_batches_gives_the_share_of_an_update() -> None:
    assert update_fraction_of([1, 2, 3, 4, 5], 2, None) == 0.4
    assert update_fraction_of([1, 2], 5, None) == 1.0
    assert update_fraction_of([1, 2], 2, 0.1) == 0.2  # the list may be a part of the data
    assert [update_fraction_of(unknown, 2, None) for unknown in (None, [], iter([1]), lambda: [1])] == [None] * 4


@pytest.mark.parametrize(("num_batches", "anchored"), [(100, True), (500, False)])
def test_a_control_variate_takes_no_pass_longer_than_the_run(num_batches: int, anchored: bool) -> None:
    """Each chain passes over the batches for its curvature. A control variate takes a pass and second gradients."""
    centres = 30 * torch.randn(num_batches, 3, generator=torch.Generator().manual_seed(0))
    calls = 0

    def energy(theta: Tensor, centre: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (theta - centre).square().sum(1) / 2

    found = sample(energy, torch.zeros(2, 3), SGHMCConfig(), num_steps=300, batches=list(centres), progress=False)
    assert bool(found.info["trial_anchored"].nan_to_num(0).amax()) == anchored
    assert (calls - 2 * num_batches > 400) == anchored  # 300 updates, the trial of rates and checks
