"""The noise that minibatches bring into the gradient of U: compared with what a sampler injects, or taken off it.

``Evaluation.grad_variance`` holds its variance V, estimated from the micro-batches of the update. A sampler that adds
noise of variance q to a momentum moved by -h grad U has q + h^2 V of it in truth; Chen, Fox and Guestrin (2014) inject
the rest only, q - h^2 V (their 2 (C - B) epsilon with B = epsilon V / 2; ``beta`` in posteriors' code is V at T = 1).
"""

from __future__ import annotations

import math
import warnings
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
            gradient, estimated from the micro-batches of each update. It takes two of them (gradient_accumulation_steps
            times processes that share a chain); None: where there are two.
    """

    measure_gradient_noise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure_gradient_noise is not None:
            self._check_flag("measure_gradient_noise", self.measure_gradient_noise)

    @property
    def needs_grad_variance(self) -> bool:
        return self.measure_gradient_noise is True

    @property
    def takes_grad_variance(self) -> bool:
        return self.measure_gradient_noise is not False or self.needs_grad_variance


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
        return self.measure_gradient_noise is True or self.correct_gradient_noise


def noise_ratio(variance: Tensor | None, problem: Problem, *, injected: float, squared_step: float) -> Info:
    """q / (h^2 V) of each chain, V [M, S] averaged over all coordinates; nothing at T = 0, or where V is not known."""
    if variance is None or (injected == 0 and squared_step > 0):
        return {}
    sizes = torch.tensor(problem.sizes).to(variance)
    per_step = injected / squared_step if squared_step > 0 else math.inf  # its limit
    return {"noise_ratio": per_step / ((variance * sizes).sum(1) / sizes.sum())}


def remaining_std(
    variance: Tensor | None, problem: Problem, *, name: str, injected: float, squared_step: float
) -> Tensor | float:
    """[M, d]: sqrt(q - h^2 V) from V [M, S], and 0 where the gradient alone brings more than q: then it warns.

    All of the noise in an update that cannot tell V: the last one of a stream may have a single micro-batch.
    """
    if variance is None:
        return math.sqrt(injected)
    left = injected - squared_step * variance
    if injected > 0 and bool((left < 0).any()):
        # without numbers, which differ from update to update: Python tells of equal warnings once
        warnings.warn(
            f"{name}: the gradient of a tensor alone brings more noise (h^2 V) than correct_gradient_noise has to "
            "inject (2 gamma h T): its momenta get none and are hotter than T. Use a larger batch or a lower learning "
            "rate",
            stacklevel=2,
        )
    return per_element(left.clamp_min(0).sqrt(), problem.sizes)


def require_friction(
    name: str, decay: float, *, h: float, friction: float, lr: float, peak: float, beta: float
) -> None:
    """Refuse an update that would reverse the momentum."""
    if decay < -1e-12:  # beta = 0 at the peak is a decay of 0, up to rounding
        raise ValueError(
            f"{name} needs 1 - h * friction >= 0, got h={h:.4g}, friction={friction:.4g}: learning_rate "
            f"{lr:.4g} is above the peak {peak:.4g} that momentum={beta:g} fixed the friction for. "
            "Make the learning rate the schedule's largest value"
        )
