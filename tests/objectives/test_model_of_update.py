"""The gradient of an update at two points."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.classifier import CHAINS, classifier, rows, theta_near


@pytest.mark.parametrize("options", [{}, {"shared": False}, {"members_per_pass": 1}])
def test_the_gradient_at_an_anchor_is_that_of_the_same_rows(options: dict[str, bool]) -> None:
    objective = classifier(**options)
    theta, batches = theta_near(objective), [rows(0, 4 * CHAINS), rows(1, 4 * CHAINS)]
    anchor = theta + 0.3
    found = objective.for_update(batches, step=0)(theta, anchor=anchor)
    torch.testing.assert_close(found.anchor_grad, objective.evaluate(anchor, batches).grad_log_lik)
    plain = objective.evaluate(theta, batches)
    torch.testing.assert_close(found.grad_log_lik, plain.grad_log_lik)
    assert plain.anchor_grad is None
    several = objective.for_update(batches, step=0)(theta, anchor=torch.stack([anchor, theta], 1)).anchor_grad
    torch.testing.assert_close(several, torch.stack([found.anchor_grad, plain.grad_log_lik], 1))
