"""Noise along the way of a chain, and what makes its steps smaller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator, randn
from hf_bayes.methods.sgmcmc import step_control
from hf_bayes.methods.sgmcmc.step_control import MAX_GROWTH, SHRINKAGE, WINDOW, cooled, step_for_noise


class Moving(NamedTuple):
    theta: Tensor
    momentum: Tensor
    step: Tensor


def of_gradients(gradients: list[list[float]], variance: float = 4.0) -> Tensor:
    """Return V of one chain after these gradients; the last direction is the prior's."""
    noise = step_control.begin(torch.tensor([variance]), len(gradients[0]))
    informed = torch.tensor([[True] * (len(gradients[0]) - 1) + [False]])
    for gradient in gradients:
        noise = step_control.take(noise, torch.tensor([gradient]), torch.clone, informed)
    return noise.variance


def test_a_pair_counts_half_its_squared_difference() -> None:
    after = of_gradients([[1.0, 5.0, 0.0], [3.0, 1.0, 100.0]])
    pair = (2.0**2 + 4.0**2) / 2 / 2  # over two directions; the third is the prior's
    assert after.item() == pytest.approx(4 + (pair - 4) / WINDOW)


def test_changes_are_measured_along_the_axes() -> None:
    noise = step_control.begin(torch.tensor([4.0]), 2)
    turned = lambda vectors: vectors.flip(1)  # noqa: E731
    for gradient in ([1.0, 0.0], [3.0, 50.0]):
        noise = step_control.take(noise, torch.tensor([gradient]), turned, torch.tensor([[False, True]]))
    assert noise.variance.item() == pytest.approx(4 + (2.0**2 / 2 - 4) / WINDOW)


def test_pairs_have_no_gradient_in_common() -> None:
    of_one, of_three = ([[0.0, 0.0], [2.0, 0.0], [50.0, 0.0]][:n] for n in (2, 3))
    assert torch.equal(of_gradients(of_one), of_gradients(of_three))


def test_a_chain_that_was_moved_begins_a_new_pair() -> None:
    noise = step_control.begin(torch.tensor([4.0]), 1)
    informed = torch.tensor([[True]])
    noise = step_control.take(noise, torch.tensor([[1.0]]), torch.clone, informed)
    noise = step_control.take(step_control.moved(noise), torch.tensor([[1e6]]), torch.clone, informed)
    assert noise.variance.item() == 4.0


@pytest.mark.statistics
@pytest.mark.parametrize("start", [1.0, 100.0])
def test_the_mean_forgets_where_the_chain_started(start: float) -> None:
    noise, rng = step_control.begin(torch.full((3,), start), 50), generator("gradients", 0)
    informed = torch.ones(3, 50, dtype=torch.bool)
    for _ in range(400):
        gradient = 3 * torch.randn(3, 50, generator=rng)
        noise = step_control.take(noise, gradient, torch.clone, informed)
    # 200 pairs leave (11/12)^200 of the start; about 2 x 12 pairs x 50 directions: 4 %
    assert noise.variance.tolist() == pytest.approx([9.0] * 3, rel=0.16)


@pytest.mark.parametrize(("growth", "expected"), [(0.1, 1.0), (0.99 * MAX_GROWTH, 1.0), (8.0, 8**-0.5)])
def test_steps_shrink_only_where_noise_has_grown(growth: float, expected: float) -> None:
    unit, variance = 0.02, 5.0
    step_size = torch.tensor([(unit / variance) ** 0.5])
    noise = step_control.begin(torch.tensor([growth * variance]), 1)
    torch.testing.assert_close(step_for_noise(step_size, noise, unit), expected * step_size)


@pytest.mark.parametrize("step", [10, 11])
def test_a_hot_chain_is_cooled_and_now_and_then_slowed(step: int) -> None:
    momentum = randn([generator("hot", 0), generator("cold", 0)], torch.empty(2, 500))
    momentum = momentum * torch.tensor([[3.0], [1.0]])
    before = SimpleNamespace(theta=torch.zeros(2, 500))
    state = Moving(0.1 * momentum, momentum, torch.tensor([step, step]))
    steps, after = cooled(torch.tensor([0.1, 0.1]), before, state, torch.ones(2))
    assert steps.tolist() == pytest.approx([0.1 * (SHRINKAGE if step == 10 else 1.0), 0.1])
    assert after.momentum[0].square().mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(after.theta[0], 0.1 * after.momentum[0])
    assert torch.equal(after.theta[1], state.theta[1])
