from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.objectives.passes import value_and_gradient

THETA = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


def loss_of(theta: Tensor) -> Tensor:
    """Return sum_i theta_i^3 for each row."""
    return theta.pow(3).sum(1)


@pytest.mark.parametrize("graph", [True, False])
def test_each_row_has_the_gradient_of_its_own_loss(graph: bool) -> None:
    with torch.set_grad_enabled(graph):
        value, gradient = value_and_gradient(loss_of, THETA)
    assert not value.requires_grad
    torch.testing.assert_close(value, torch.tensor([9.0, 26.0]))
    torch.testing.assert_close(gradient, 3 * THETA.square())


def test_without_a_gradient_no_graph_is_made() -> None:
    seen = []

    def watched(theta: Tensor) -> Tensor:
        seen.append(theta.requires_grad or torch.is_grad_enabled())
        return loss_of(theta)

    with torch.enable_grad():
        value, gradient = value_and_gradient(watched, THETA, gradient=False)
    assert seen == [False]
    assert gradient is None
    torch.testing.assert_close(value, torch.tensor([9.0, 26.0]))
