"""The behaviour that a rule or a kernel has where its method gives none of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_bayes.core.types import (
    UNNAMED,
    Kernel,
    Problem,
    Rule,
    locate_at_theta,
    scale_momentum,
)
from hf_bayes.distributions.energy import FlatPrior

CHAINS, DIM = 100, 1000


class Position(NamedTuple):
    theta: Tensor


class Moving(NamedTuple):
    theta: Tensor
    momentum: Tensor


def moving(temperature: float) -> Moving:
    """Return chains whose momenta have this temperature."""
    generator = torch.Generator().manual_seed(0)
    theta, noise = torch.randn(2, CHAINS, DIM, generator=generator)
    return Moving(theta, temperature**0.5 * noise)


def kinetic_temperature(state: Moving) -> float:
    return float(state.momentum.square().mean())


@pytest.mark.parametrize("ratio", [0.01, 1.0, 4.0])
def test_momenta_get_the_temperature_of_the_next_rule(ratio: float) -> None:
    before = moving(0.5)
    after = scale_momentum(before, ratio)
    assert kinetic_temperature(after) == pytest.approx(ratio * kinetic_temperature(before), rel=1e-5)  # float32
    # 4 standard errors of the mean of 100,000 squares, whose standard deviation is sqrt(2) times their mean
    assert kinetic_temperature(after) == pytest.approx(0.5 * ratio, rel=4 * (2 / (CHAINS * DIM)) ** 0.5)
    assert after.theta is before.theta


def test_a_momentum_scaled_without_the_root_is_found() -> None:
    before = moving(1.0)
    twin = before._replace(momentum=4.0 * before.momentum)
    assert kinetic_temperature(twin) != pytest.approx(kinetic_temperature(scale_momentum(before, 4.0)), rel=0.5)


def test_a_rescaled_state_leaves_the_state_before_it_unchanged() -> None:
    before = moving(1.0)
    kept = before.momentum.clone()
    scale_momentum(before, 4.0)
    assert torch.equal(before.momentum, kept)


def test_a_state_without_momentum_is_the_same_at_any_temperature() -> None:
    state = Position(torch.ones(2, 3))
    assert scale_momentum(state, 4.0) is state


def test_a_gradient_is_taken_at_the_position_of_the_chains() -> None:
    state = moving(1.0)
    theta, after = locate_at_theta(state, [])
    assert theta is state.theta
    assert after is state


def rule() -> Rule[Any]:
    """Return a rule with nothing but what every rule has to have."""
    return Rule(
        init=lambda theta, rngs: Position(theta),
        locate=locate_at_theta,
        update=lambda state, evaluation, lr, rngs: (state, {}),
        finish=lambda state, draws: draws,  # type: ignore[arg-type,return-value]
    )


def test_a_rule_asks_for_one_gradient_and_for_no_further_pass() -> None:
    plain, state = rule(), Position(torch.ones(2, 3))
    assert plain.anchor(state) is None
    assert plain.restart(state, torch.tensor([True, False])) is state
    assert plain.estimates(state) is False
    assert plain.final_pass is None
    assert not plain.early_passes


def test_only_a_kernel_needs_the_same_target_in_every_evaluation() -> None:
    kernel: Kernel[Any] = Kernel(
        init=lambda theta, evaluate, rngs: Position(theta),
        step=lambda state, evaluate, rngs: (state, {}),
        finish=lambda state, draws: draws,  # type: ignore[arg-type,return-value]
    )
    assert kernel.is_exact
    assert not rule().is_exact
    assert kernel.final_pass is None
    assert not kernel.later_starts


def test_defaults_that_rules_share_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="item assignment"):
        rule().early_passes[1] = lambda state, passes: state  # type: ignore[index]


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ({"a": (2, 3), "b": (4,)}, (6, 4)),
        ({"scalar": (), "b": (4,)}, (1, 4)),
        ({UNNAMED: (5,)}, (5,)),
        ({}, ()),
    ],
)
def test_sizes_are_the_elements_of_each_tensor_in_order(
    shapes: dict[str, tuple[int, ...]], sizes: tuple[int, ...]
) -> None:
    problem = Problem(num_data=10, prior=FlatPrior(), learning_rate=0.1, num_steps=4, burn_in=2, shapes=shapes)
    assert problem.sizes == sizes
