from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import chain_generators
from hf_bayes.core.types import Evaluation, Kernel, Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from tests.chains.bowl import run
from tests.chains.test_theta_form import named_bowl


def first_step(**changes: Any) -> Any:
    """Return the state after one tiny update of SGHMC without friction or noise."""
    return run(method=SGHMCConfig(temperature=1e-30), num_steps=1, learning_rate=1e-6, **changes).state


def test_chains_begin_with_the_given_momentum() -> None:
    momentum = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    # beta = .9 of it is left after one update; the gradient adds sqrt(l) = 1e-3
    assert torch.allclose(first_step(state={"momentum": momentum}).momentum, 0.9 * momentum, atol=2e-3)
    assert torch.allclose(first_step(state={"momentum": 2.0}).momentum, torch.full((2, 3), 1.8), atol=2e-3)


def test_a_momentum_may_have_the_form_of_theta() -> None:
    theta = {"matrix": torch.ones(2, 2, 3), "scalar": torch.ones(2)}
    momentum = {"matrix": torch.full((2, 2, 3), 2.0), "scalar": torch.full((2,), 4.0)}
    found = run(named_bowl, theta=theta, method=SGHMCConfig(temperature=1e-30), num_steps=1, learning_rate=1e-6,
                state={"momentum": momentum}).state.momentum  # fmt: skip
    assert torch.allclose(found, 0.9 * torch.tensor([2.0] * 6 + [4.0]).expand(2, -1), atol=2e-3)


def test_chains_begin_with_the_given_friction() -> None:
    method = SGNHTConfig(thermostat_steps=1e9)  # so slow that the friction stays
    found = run(method=method, num_steps=1, state={"friction": 7.0}).state.friction
    assert torch.allclose(found, torch.full((2,), 7.0))


def test_a_kernel_begins_with_the_given_scale() -> None:
    scale = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    found = run(method=HMCConfig(target_acceptance=None), num_steps=2, state={"scale": scale}).state.scale
    assert torch.equal(found, scale)


def test_a_whole_state_continues_a_run() -> None:
    first = run(method=SGHMCConfig())
    again = first_step(theta=first.state.theta, state=first.state)
    assert torch.allclose(again.momentum, 0.9 * first.state.momentum, atol=2e-3)
    assert again.step.tolist() == [11, 11]


@pytest.mark.parametrize(
    "method",
    [
        MetropolisConfig(proposal_std=1.0, target_acceptance=None),
        HMCConfig(step_size=0.3, num_leapfrog=3, target_acceptance=None),
        GPSConfig(max_std=2.0),
    ],
)
def test_a_state_of_other_points_has_no_energies(method: MethodConfig) -> None:
    state = run(method=method, theta=torch.zeros(20, 3), num_steps=20).state
    far = torch.full((20, 3), 3.0)
    found = run(method=method, theta=far, state=state, num_steps=40)
    assert not (found.draws[:, -1] == far).all(1).any()  # with the energy of the old points all moves are rejected


def start_of(kernel: Kernel[Any], scale: float) -> dict[str, Tensor]:
    """Return the state of two chains at 1 under the energy ``scale`` |theta|^2."""

    def evaluate(theta: Tensor, **_: Any) -> Evaluation:
        return Evaluation(-scale * theta.square().sum(1), -2 * scale * theta)

    state: dict[str, Tensor] = kernel.init(torch.ones(2, 3), evaluate, chain_generators(0, 2))._asdict()
    return state


def test_every_kernel_names_what_it_evaluates() -> None:
    problem = Problem(10.0, FlatPrior(), 0.1, 40, 0, {"": (3,)}, batch_fraction=0.01, update_fraction=0.01)
    needed: dict[str, dict[str, Any]] = {"ekf": {"init_std": 1.0}, "low_rank_vi": {"rank": 2}}
    seen = set()
    for name, config in METHODS.items():
        method = config(**needed.get(name, {})).build(problem)
        if isinstance(method, Kernel):
            once, twice = start_of(method, 1.0), start_of(method, 2.0)
            differ = {field for field in once if not torch.equal(once[field], twice[field])}
            assert differ == set(method.functions_of_theta), name
            seen.add(name)
    assert seen >= {"metropolis", "hmc", "gps", "penalty"}


def test_other_fields_and_generators_are_as_without_it() -> None:
    plain = run(method=SGNHTConfig())
    given = run(method=SGNHTConfig(), state={"friction": run(method=SGNHTConfig(), num_steps=1).state.friction * 0 + 1})
    assert not torch.equal(plain.draws, given.draws)
    same = run(method=SGNHTConfig(), state={})
    assert torch.equal(plain.draws, same.draws)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"speed": 1.0}, r"the state of sghmc has no field speed to give; it has \['momentum', 'step'"),
        ({"theta": 1.0}, "no field theta to give: theta is an argument of its own"),
        ({"momentum": torch.ones(3)}, r"state\['momentum'\] must be a number or a tensor \[2, 3\], got shape \[3\]"),
        ({"momentum": "high"}, r"state\['momentum'\] must be a number or a tensor \[2, 3\], got str"),
        ({"momentum": torch.full((2, 3), torch.nan)}, r"state\['momentum'\] has elements that are not finite"),
        ([1.0], "state must map fields of the state of sghmc to tensors, or be such a state, got list"),
    ],
)
def test_a_bad_state_is_refused_by_its_field(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(method=SGHMCConfig(), state=state)


def test_an_energy_is_no_field_to_give() -> None:
    with pytest.raises(ValueError, match=r"no field energy to give: theta determines it; it has \['log_std', "):
        run(method=MetropolisConfig(), state={"energy": 0.0})


def test_a_state_and_a_warm_start_are_refused() -> None:
    with pytest.raises(ValueError, match="warm_start_steps=2 come before that: leave one of the two out"):
        run(method=SGHMCConfig(warm_start_steps=2), burn_in=4, state={"momentum": 0.0})
