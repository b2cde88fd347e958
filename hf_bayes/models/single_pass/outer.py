"""Outputs y = gain (W x + noise of W) of a linear layer, kept as the columns of its input x until they are asked for.

The covariance of y is W F F' W' and the exact covariance of the noise of W, where F are the columns of x. Only where y
goes on through the network, the noise of W is sketched by the draws that all layers share. Leading columns of the
covariance of all weights (``drawn.leading_columns``) move W together with x: they are columns of y in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.uncertainty.likelihoods import widened


@dataclass(frozen=True, eq=False)
class Outer:
    """A linear layer whose outputs are asked for.

    Attributes:
        weight: [C, n] the mean of W; None is the identity.
        own: the noise of W and of the bias, with its input; None if the layer is frozen.
        draws: [S, C, n] draws of the noise of W, and [S, C] of the bias, over sqrt(S); None if frozen.
        gain: the outputs have been multiplied by this number.
        shared: the number of draws, the first ones, that are leading columns. ``own`` does not contain their noise.
    """

    weight: Tensor | None
    own: LinearSource | None = None
    draws: tuple[Tensor | None, Tensor | None] = (None, None)
    gain: float | Tensor = 1.0
    shared: int = 0

    def columns(self, inputs: Tensor | None) -> Tensor:
        """Return [S, ..., C], the columns of y; the noise of W is sketched.

        Args:
            inputs: [S, ..., n] the columns of x; None means 0.
        """
        parts = [*([] if inputs is None else [self._behind(inputs)]), *self._moved(slice(None))]
        total = sum(parts[1:], parts[0])
        return total if isinstance(self.gain, float) and self.gain == 1 else self.gain * total

    def variance(self, inputs: Tensor | None) -> Tensor:
        """Return the variances [..., C] of y."""
        found = sum(column.square() for column in self._each(inputs))
        if self.own is not None and self.own.law is not None and self.own.mean is not None:
            found = found + self.own.factor * self.own.law.variance(self.own.mean, None)
        return self.gain**2 * found  # type: ignore[operator, return-value]

    def covariance(self, inputs: Tensor | None) -> Tensor:
        """Return [..., C, C]."""
        found = sum(column[..., :, None] * column[..., None, :] for column in self._each(inputs))
        return self.gain**2 * (found if self.own is None else found + self.own.covariance())  # type: ignore[return-value]

    def times(self, inputs: Tensor | None, vectors: Tensor) -> Tensor:
        """Return [..., C], the covariance times ``vectors`` [..., C], without forming it."""
        found = torch.zeros_like(vectors)
        for column in self._each(inputs):
            found = found + column * (column * vectors).sum(-1, keepdim=True)
        return self.gain**2 * (found if self.own is None else found + self.own.times(vectors))

    def leading(self, change: Callable[[Tensor], Tensor]) -> Outer:
        """Return the layer after a change of the leading dimensions of its outputs."""
        return self if self.own is None else replace(self, own=self.own.leading(change))

    def _behind(self, inputs: Tensor) -> Tensor:
        return inputs if self.weight is None else F.linear(inputs, self.weight.to(inputs.dtype))

    def _moved(self, chosen: slice) -> Iterator[Tensor]:
        """Yield [s, ..., C], dW x and db for chosen draws."""
        if self.own is None or self.own.mean is None:
            return
        weight, bias = self.draws
        lead, size = self.own.mean.shape[:-1], self.own.factor**0.5
        if weight is not None:
            yield drawn_products(self.own.mean.to(weight.dtype), weight[chosen]) * size
        if bias is not None:
            some = bias[chosen] * size
            yield some.view(len(some), *[1] * len(lead), -1).expand(len(some), *lead, -1)

    def _each(self, inputs: Tensor | None) -> Iterator[Tensor]:
        """Yield W F, with what leading columns add, a column at a time: all of a vocabulary take too much memory."""
        for index in range(self.shared if inputs is None else len(inputs)):
            parts = [] if inputs is None else [self._behind(inputs[index])]
            if index < self.shared:
                parts += [part[0] for part in self._moved(slice(index, index + 1))]
            yield widened(sum(parts[1:], parts[0]))


def drawn_products(x: Tensor, draws: Tensor) -> Tensor:
    """Return [S, ..., out], W_s x for draws [S, out, in] and x [..., in]."""
    return torch.matmul(x.flatten(0, -2), draws.mT).unflatten(1, x.shape[:-1])
