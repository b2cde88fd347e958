"""The energy and the call that the tests of ``sample`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig


def bowl(theta: Tensor, batch: object) -> Tensor:
    return 0.5 * theta.square().sum(1)


def run(energy: Callable[[Tensor, Any], Tensor] = bowl, **changes: Any) -> Any:
    arguments = {"theta": torch.ones(2, 3), "method": SGLDConfig(), "num_steps": 10, "learning_rate": 0.1, **changes}
    theta, method = arguments.pop("theta"), arguments.pop("method")
    return sample(energy, theta, method, **arguments)
