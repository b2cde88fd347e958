"""The noise that minibatches bring into the gradient of U: compared with what a sampler injects, or taken off it.

``Evaluation.grad_variance`` holds its variance V, estimated from the micro-batches of the update. A sampler that adds
noise of variance q to a momentum moved by -h grad U has q + h^2 V of it in truth; Chen, Fox and Guestrin (2014) inject
the rest only, q - h^2 V (their 2 (C - B) epsilon with B = epsilon V / 2; ``beta`` in posteriors' code is V at T = 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.config import MethodConfig
from hf_bayes.subspace import per_element
from hf_bayes.types import Info, Problem


@dataclass(frozen=True, kw_only=True)
class LangevinConfig(MethodConfig):
    """What samplers share that add noise to a gradient.

    Attributes:
        measure_gradient_noise: report ``noise_ratio``, the variance of the sampler's own noise over that of its
            gradient, estimated from the micro-batches of each update (needs gradient_accumulation_steps >= 2).
    """

    measure_gradient_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("measure_gradient_noise", self.measure_gradient_noise)

    @property
    def needs_grad_variance(self) -> bool:
        return self.measure_gradient_noise


@dataclass(frozen=True, kw_only=True)
class CorrectedLangevinConfig(LangevinConfig):
    """A sampler that can take the gradient's noise off its own.

    Attributes:
        correct_gradient_noise: inject less noise by what the gradient brings (Chen et al. 2014), measured likewise.
    """

    correct_gradient_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("correct_gradient_noise", self.correct_gradient_noise)

    @property
    def needs_grad_variance(self) -> bool:
        return self.measure_gradient_noise or self.correct_gradient_noise


def noise_ratio(variance: Tensor | None, problem: Problem, *, injected: float, squared_step: float) -> Info:
    """q / (h^2 V) of each chain, V [M, S] averaged over all coordinates; nothing where V was not measured, or at T = 0."""
    if variance is None or (injected == 0 and squared_step > 0):
        return {}
    sizes = torch.tensor(problem.sizes).to(variance)
    per_step = injected / squared_step if squared_step > 0 else math.inf  # its limit
    return {"noise_ratio": per_step / ((variance * sizes).sum(1) / sizes.sum())}


def remaining_std(variance: Tensor | None, problem: Problem, *, injected: float, squared_step: float) -> Tensor:
    """[M, d]: sqrt(q - h^2 V) from V [M, S], and 0 where the gradient alone brings more than q."""
    assert variance is not None
    return per_element((injected - squared_step * variance).clamp_min(0).sqrt(), problem.sizes)
