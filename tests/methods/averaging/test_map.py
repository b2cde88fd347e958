from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Kernel, Problem
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from tests.methods.by_hand import evaluated

N, STD = 40, 0.7
INPUTS = torch.randn(N, 5, generator=generator("x"), dtype=torch.float64)
TARGETS = torch.randn(N, generator=generator("y"), dtype=torch.float64)
START = torch.randn(2, 5, generator=generator("theta"), dtype=torch.float64)
PRIOR = GaussianPrior(torch.zeros((), dtype=torch.float64), torch.tensor(STD, dtype=torch.float64))


def evaluate(theta: Tensor, *, gradient: bool = True) -> Evaluation:
    """Return the evaluation of a linear regression with unit noise."""
    residual = TARGETS - theta @ INPUTS.T
    return Evaluation(-0.5 * residual.square().sum(1), residual @ INPUTS if gradient else None)


def mode(prior_weight: float) -> Tensor:
    """Return the minimiser [5] of U_lik + prior_weight * U_prior."""
    precision = INPUTS.T @ INPUTS + prior_weight / STD**2 * torch.eye(5, dtype=torch.float64)
    return torch.linalg.solve(precision, INPUTS.T @ TARGETS)


def problem(**changes: object) -> Problem:
    return Problem(N, PRIOR, learning_rate=0.02, num_steps=60, burn_in=30, shapes={"": (5,)})._replace(**changes)


def run(config: MethodConfig, num_steps: int, *, lr: float = 0.02, seed: int = 0) -> tuple[object, list[Tensor]]:
    """Return the last state, and theta after each update."""
    method = assemble(config, problem(learning_rate=lr))
    rngs = [generator(seed, chain) for chain in range(2)]
    path = []
    state = method.init(START, evaluate, rngs) if isinstance(method, Kernel) else method.init(START, rngs)
    for step in range(num_steps):
        if isinstance(method, Kernel):
            if step in method.later_starts:
                state = method.later_starts[step](state, evaluate, rngs)
            state, _ = method.step(state, evaluate, rngs)
        else:
            theta, state = method.locate(state, rngs)
            state, _ = method.update(state, evaluated(method, state, theta, evaluate), lr, rngs)
        path.append(state.theta)
    return state, path


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_is_torch_adamw_without_decay_on_the_mean_loss(momentum: float) -> None:
    weights = START.clone().requires_grad_()
    adamw = torch.optim.AdamW([weights], lr=0.02, betas=(momentum, 0.999), weight_decay=0.0)
    _, path = run(MAPConfig(momentum=momentum), 60)
    for theta in path:
        adamw.zero_grad()
        loss = 0.5 * (TARGETS - weights @ INPUTS.T).square().sum() + 0.5 * weights.square().sum() / STD**2
        (loss / N).backward()
        adamw.step()
        assert (theta - weights.detach()).abs().max() < 1e-12


@pytest.mark.parametrize(("temper", "prior_weight"), [("posterior", 1.0), ("likelihood", 0.0)])
def test_it_ends_at_the_maximum_of_posterior_or_likelihood(temper: str, prior_weight: float) -> None:
    _, path = run(MAPConfig(temper=temper), 2000)  # type: ignore[arg-type]
    assert (path[-1] - mode(prior_weight)).abs().max() < 1e-6
    assert (mode(1.0) - mode(0.0)).abs().max() > 1e-3  # the check distinguishes them


def test_its_members_are_the_last_points_of_the_chains() -> None:
    def energy(theta: Tensor, batch: None) -> Tensor:
        return 0.5 * theta.square().sum(1)

    result = sample(energy, START, MAPConfig(), num_steps=50, learning_rate=0.1)
    assert torch.equal(result.approximation.sample(2), result.draws[:, -1])
    with pytest.raises(ValueError, match="asked for 3 members, 2 are stored"):
        result.approximation.sample(3)


def test_info_is_the_energy_with_its_prior() -> None:
    method = assemble(MAPConfig(), problem())
    rngs = [generator(0), generator(1)]
    _, info = method.update(method.init(START, rngs), evaluate(START), 0.02, rngs)  # type: ignore[union-attr,call-arg]
    assert torch.equal(info["energy"], -evaluate(START).log_lik - PRIOR.log_prob(START))


@pytest.mark.parametrize("temperature", [1.0, 1e-6])
def test_a_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"map: temperature must be 0, got .* use a sampler"):
        MAPConfig(temperature=temperature)


def test_more_draws_than_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match=r"map: draws_per_chain must be 1, got 3: .* num_chains"):
        MAPConfig(draws_per_chain=3)


def test_momentum_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum must be a finite number >= 0 and < 1, got 1"):
        MAPConfig(momentum=1.0)


WARM = {"warm_start_steps": 20, "warm_start_learning_rate": 0.05}
INNER = [SGHMCConfig(), SGLDConfig(), MAPConfig(), MeanFieldConfig(), MetropolisConfig(), HMCConfig()]


@pytest.mark.parametrize("inner", INNER, ids=[config.name for config in INNER])
def test_a_warm_start_is_adamw_and_then_the_method_from_there(inner: MethodConfig) -> None:
    state, path = run(dataclasses.replace(inner, **WARM), 50)  # type: ignore[arg-type]
    _, adamw = run(MAPConfig(), 20, lr=0.05)
    for warm, expected in zip(path[:19], adamw[:19], strict=True):
        assert torch.equal(warm, expected)
    # from there: the method with fresh generators, in a run that is 20 updates shorter
    method = inner.build(problem(num_steps=40, burn_in=10))
    rngs = [generator(0, chain) for chain in range(2)]
    if isinstance(method, Kernel):
        alone = method.init(adamw[19], evaluate, rngs)
        for _ in range(30):
            alone, _ = method.step(alone, evaluate, rngs)
    else:
        alone = method.init(adamw[19], rngs)
        for _ in range(30):
            theta, alone = method.locate(alone, rngs)
            alone, _ = method.update(alone, evaluated(method, alone, theta, evaluate), 0.02, rngs)
    for name, tensor in alone._asdict().items():
        assert torch.equal(getattr(state, name), tensor), name


def test_the_warm_started_method_begins_at_its_own_temperature() -> None:
    method = assemble(SGHMCConfig(temperature=9.0, **WARM), problem(prior=FlatPrior(), shapes={"": (4096,)}))
    rngs = [generator(0)]
    theta = torch.zeros(1, 4096, dtype=torch.float64)
    state = method.init(theta, rngs)  # type: ignore[call-arg]
    for _ in range(20):
        state, _ = method.update(state, Evaluation(torch.zeros(1), -state.theta), 0.02, rngs)  # type: ignore[union-attr]
    assert state.momentum.square().mean() == pytest.approx(9.0, rel=0.09)  # 4 standard errors: 4 * sqrt(2 / 4096)


def test_a_warm_start_goes_downhill_on_what_the_method_runs_on() -> None:
    warm = dataclasses.replace(SGHMCConfig(temperature=5.0, temper="likelihood"), warm_start_steps=2000)
    method = assemble(dataclasses.replace(warm, warm_start_learning_rate=0.02), problem(num_steps=3000, burn_in=2500))
    rngs = [generator(0), generator(1)]
    state = method.init(START, rngs)  # type: ignore[call-arg]
    for _ in range(2000):
        state, _ = method.update(state, evaluate(state.theta), 0.02, rngs)  # type: ignore[union-attr]
    assert (state.theta - mode(5.0)).abs().max() < 1e-5


def test_the_schedule_does_not_touch_the_warm_start() -> None:
    _, path = run(SGHMCConfig(**WARM), 20, lr=0.001)
    _, other = run(SGHMCConfig(**WARM), 20, lr=0.01)
    assert torch.equal(path[19], other[19])


def test_sample_reports_both_phases() -> None:
    def energy(theta: Tensor, batch: None) -> Tensor:
        return 0.5 * theta.square().sum(1)

    info = sample(energy, START, SGHMCConfig(**WARM), num_steps=50, learning_rate=0.02, burn_in=25).info
    assert info["energy"].isfinite().all(1).tolist() == [True] * 20 + [False] * 30
    assert info["kinetic_temperature"].isfinite().all(1).tolist() == [False] * 20 + [True] * 30
