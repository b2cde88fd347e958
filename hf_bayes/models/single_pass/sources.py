"""The covariance between the outputs of a linear layer, kept as the layer's input until it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bayes.models.single_pass.weight_laws import WeightLaw


@dataclass(frozen=True, eq=False)
class LinearSource:
    """Outputs W x with independent x, and with the noise of W itself.

    Attributes:
        weight: [C, n] the mean of W.
        variance: [..., n] of x; None means 0.
        mean: [..., n] of x, if W is random.
        law: the law of W; None if it is frozen.
        factor: the factor of the noise of W.
        gain: the outputs have been multiplied by this number.
    """

    weight: Tensor
    variance: Tensor | None
    mean: Tensor | None = None
    law: WeightLaw | None = None
    factor: float = 1.0
    gain: float | Tensor = 1.0

    def covariance(self) -> Tensor:
        """Return [..., C, C]."""
        parts = []
        if self.variance is not None:
            parts.append((self.weight * self.variance[..., None, :]) @ self.weight.mT)
        if self.law is not None and self.mean is not None:
            parts.append(self.factor * self.law.covariance(self.mean, self.variance))
        return self.gain**2 * torch.stack(parts).sum(0)

    def times(self, vectors: Tensor) -> Tensor:
        """Return [..., C], the covariance times ``vectors`` [..., C], without forming it."""
        found = torch.zeros_like(vectors)
        if self.variance is not None:
            found = found + ((vectors @ self.weight) * self.variance) @ self.weight.mT
        if self.law is not None and self.mean is not None:
            found = found + self.factor * self.law.times(self.mean, self.variance, vectors)
        return self.gain**2 * found

    def scaled(self, factor: float | Tensor) -> LinearSource:
        """Return the source of outputs that have been multiplied by a number."""
        return replace(self, gain=self.gain * factor)

    def leading(self, change: Callable[[Tensor], Tensor]) -> LinearSource:
        """Return the source after a change of the leading dimensions."""
        variance, mean = (None if part is None else change(part) for part in (self.variance, self.mean))
        return replace(self, variance=variance, mean=mean)
