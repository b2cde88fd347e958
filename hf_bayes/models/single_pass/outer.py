"""Outputs y = gain (W x + noise of W) of a linear layer, kept as the columns of its input x until they are asked for.

The covariance of y is W F F' W' and the exact covariance of the noise of W, where F are the columns of x. The noise of
W multiplies the second moment of x (``weight_laws``, eq. 1). Where y goes on through the network, the noise of W is
sketched by the draws that all layers share. It is also sketched if the noise of W is correlated with the noise of x, as
with a full covariance: the two exact parts would leave out the covariance between them. Leading columns of the
covariance of all weights (``drawn.leading_columns``) move W together with x: they are columns of y in all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass.second_order import with_drift
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
        drawn: True if the noise of W is correlated with the noise of x. ``draws`` then take the place of ``own``.
    """

    weight: Tensor | None
    own: LinearSource | None = None
    draws: tuple[Tensor | None, Tensor | None] = (None, None)
    gain: float | Tensor = 1.0
    shared: int = 0
    drawn: bool = False

    def columns(self, inputs: Tensor | None) -> Tensor:
        """Return [S + 1, ..., C], the columns and the drift of y; the noise of W is sketched.

        Args:
            inputs: [S + 1, ..., n] the columns and the drift of x; None means 0.
        """
        found = None if inputs is None else self._behind(inputs)
        x = self._expected(inputs)
        if x is not None and inputs is not None:
            x = at_draws(x, inputs[:-1].to(x.dtype), self.shared)
        elif x is not None:
            x = x[None]
        for part in self._moved(x, slice(None)):
            found = with_drift(part) if found is None else torch.cat([found[:-1] + part, found[-1:]])
        assert found is not None
        return found if isinstance(self.gain, float) and self.gain == 1 else self.gain * found

    def drift(self, inputs: Tensor | None) -> Tensor:
        """Return the drift [..., C] of y."""
        if inputs is not None:
            return self.gain * self._behind(inputs[-1])
        assert self.own is not None
        assert self.own.mean is not None
        return self.own.mean.new_zeros(*self.own.mean.shape[:-1], len(self.own.weight))

    def variance(self, inputs: Tensor | None) -> Tensor:
        """Return the variances [..., C] of y."""
        found = sum(column.square() for column in self._each(inputs))
        for own in self._sources(inputs):
            assert own.law is not None
            assert own.mean is not None
            found = found + own.factor * own.law.variance(own.mean, None)
        return self.gain**2 * found  # type: ignore[return-value]

    def covariance(self, inputs: Tensor | None) -> Tensor:
        """Return [..., C, C]."""
        found = sum(column[..., :, None] * column[..., None, :] for column in self._each(inputs))
        return self.gain**2 * sum((own.covariance() for own in self._sources(inputs)), found)  # type: ignore[return-value]

    def times(self, inputs: Tensor | None, vectors: Tensor) -> Tensor:
        """Return [..., C], the covariance times ``vectors`` [..., C], without forming it."""
        found = torch.zeros_like(vectors)
        for column in self._each(inputs):
            found = found + column * (column * vectors).sum(-1, keepdim=True)
        return self.gain**2 * sum((own.times(vectors) for own in self._sources(inputs)), found)

    def leading(self, change: Callable[[Tensor], Tensor]) -> Outer:
        """Return the layer after a change of the leading dimensions of its outputs."""
        return self if self.own is None else replace(self, own=self.own.leading(change))

    def _behind(self, inputs: Tensor) -> Tensor:
        return inputs if self.weight is None else F.linear(inputs, self.weight.to(inputs.dtype))

    def _sources(self, inputs: Tensor | None) -> Iterator[LinearSource]:
        """Yield the noise of W times E x, and times each column of x: the second moment of x is their sum (eq. 1)."""
        own = self.own
        if own is None or own.law is None or own.mean is None or (self.drawn and inputs is not None):
            return
        yield replace(own, mean=self._expected(inputs))
        if inputs is not None:
            law = own.law.without_bias()
            for column in inputs[:-1]:
                yield replace(own, mean=column.to(own.mean.dtype), law=law)

    def _expected(self, inputs: Tensor | None) -> Tensor | None:
        """Return E x [..., n]; None if the layer is frozen."""
        mean = None if self.own is None else self.own.mean
        return mean if mean is None or inputs is None else mean + inputs[-1].to(mean.dtype)

    def _moved(self, x: Tensor | None, chosen: slice) -> Iterator[Tensor]:
        """Yield [s, ..., C], dW x and db for chosen draws, where x is [s, ..., n] or [1, ..., n]; None if frozen."""
        if self.own is None or x is None:
            return
        weight, bias = self.draws
        lead, size = x.shape[1:-1], self.own.factor**0.5
        if weight is not None:
            yield drawn_products(x.to(weight.dtype), weight[chosen]) * size
        if bias is not None:
            some = bias[chosen] * size
            yield some.view(len(some), *[1] * len(lead), -1).expand(len(some), *lead, -1)

    def _each(self, inputs: Tensor | None) -> Iterator[Tensor]:
        """Yield W F, with what draws of W add to it, a column at a time: all of a vocabulary take too much memory.

        Leading columns move W, and all other draws do if they are ``drawn``.
        """
        expected = self._expected(inputs)
        count = self.shared if inputs is None else len(inputs) - 1
        for index in range(count):
            parts = [] if inputs is None else [self._behind(inputs[index])]
            if index < self.shared or self.drawn:
                x = expected
                if x is not None and inputs is not None and index >= self.shared:
                    x = x + float(count - self.shared) ** 0.5 * inputs[index].to(x.dtype)  # as ``at_draws``
                parts += [part[0] for part in self._moved(None if x is None else x[None], slice(index, index + 1))]
            yield widened(sum(parts[1:], parts[0]))


def at_draws(expected: Tensor, columns: Tensor, shared: int) -> Tensor:
    """Return [S, ..., n], the values of x that random weights multiply in each column.

    The noise of the weights is independent of the noise e = sqrt(S - n) F_s of x along the same draw. Their product
    adds to the variance: it is what the second moment of x in eq. 1 has beyond the square of the mean. The n leading
    columns move weights and x together, so that they read E x alone. A covariance between layers, as a full one has,
    gives the product a mean. It counts as variance, and is of the fourth order in the noise.

    Args:
        expected: [..., n] E x, or [S, ..., n].
        columns: [S, ..., n] of x.
        shared: the number of leading columns.
    """
    scale = torch.full((len(columns),), float(max(len(columns) - shared, 0)) ** 0.5).to(columns)
    scale[:shared] = 0
    return expected + columns * scale.view(-1, *[1] * (columns.ndim - 1))


def drawn_products(x: Tensor, draws: Tensor) -> Tensor:
    """Return [S, ..., out], W_s x_s for draws [S, out, in] and x [S, ..., in], or [1, ..., in] for all draws."""
    return torch.matmul(x.flatten(1, -2), draws.mT).unflatten(1, x.shape[1:-1])  # type: ignore[no-any-return]
