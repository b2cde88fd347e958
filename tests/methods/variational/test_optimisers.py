from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.methods.variational.optimisers import OptimiserName, direction


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.999), "weight_decay": 0.0}),
        ("sgd", torch.optim.SGD, {"momentum": 0.8}),
    ],
)
def test_directions_are_those_of_torch(name: OptimiserName, reference: Any, options: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    theta, first, second = parameter.detach().clone(), *torch.zeros(2, 4, dtype=torch.float64)
    torch_optimiser, own = reference([parameter], lr=0.1, **options), direction(name, 0.8)
    for step in range(1, 6):
        gradient = torch.arange(4, dtype=torch.float64) - 1.5 + 0.3 * step
        parameter.grad = gradient.clone()
        torch_optimiser.step()
        first, second, divisor = own(gradient, first, second, step)
        theta = theta - 0.1 * first / divisor
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-12, atol=1e-12)
