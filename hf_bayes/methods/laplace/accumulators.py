"""The sums from which each structure of H is made, accumulated over VJPs while the data stream by.

A vector-Jacobian product (VJP, see ``estimators``) gives the input and output gradient of each module. All sums are
over rows. So the result does not depend on batches, gradient accumulation or the number of processes.

The VJP of a row of weight w has the factor sqrt(w), so that its outer product has the factor w. A sum of anything else
than outer products takes the weights from ``begin``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.low_rank_curvature import LowRankCurvature

ROW_BUDGET = 1 << 26
"""The largest number of elements in the row gradients of one module at a time. A single row is never split."""

OVERSAMPLING = 10
"""The number of columns of the sketch beyond the rank."""


class UnsupportedModule(ValueError):
    """The error of a module whose gradients of single rows are not defined, or do not fit the structure of H."""


class Layer(Protocol):
    """The interface of a module whose input and output gradient are recorded (``members.module_hooks.HookedLayer``)."""

    path: str
    names: dict[str, str]
    weight: str | None
    transposed: bool
    linear: bool
    tied: set[str]

    def row_gradients(self, x: Tensor, g: Tensor, dtype: torch.dtype, *, num_texts: int = 1) -> dict[str, Tensor]: ...


class Processes(Protocol):
    """The processes that hold other rows of the same data (``distributed.ChainMesh``)."""

    def sum_over_data(self, tensor: Tensor) -> Tensor: ...

    def share(self, value: Any) -> list[Any]: ...


class Accumulator(ABC):
    """Sums over VJPs.

    ``add`` takes one module's part of a VJP (``members.module_hooks.LayerRecord``). ``end_vjp`` is called after the
    last module of each VJP.
    """

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self.layout, self.like = layout, like
        self.num_rows = 0
        self.roots: Tensor | None = None

    @abstractmethod
    def add(self, record: Any) -> None:
        """Add one module's part of a VJP."""

    def end_vjp(self) -> None:  # noqa: B027  separate sums of modules do not need it
        """End a VJP: all modules, over all rows of the batch, have been added."""

    @abstractmethod
    def result(self) -> Curvature:
        """Return the curvature from the sums."""

    def begin(self, num_rows: int, weights: Tensor | None = None) -> None:
        """Begin a batch of ``num_rows`` rows.

        Args:
            weights: [num_rows] the weights of the rows; None if each row counts once.
        """
        self.num_rows = num_rows
        self.roots = None if weights is None else weights.to(self.like).sqrt()

    def _rooted(self, values: Tensor, rows: slice) -> Tensor:
        """Return ``values`` [R, ...] of some rows of the batch, multiplied by the roots of the rows' weights."""
        if self.roots is None:
            return values
        return values * self.roots[rows].to(values.dtype).view(-1, *[1] * (values.ndim - 1))

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return the sums."""

    def sum_over(self, processes: Processes) -> None:
        """Add the sums of the other processes."""
        for tensor in self.tensors():
            processes.sum_over_data(tensor)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: self.like.new_zeros(shape) for name, shape in self.layout.named_shapes.items()}

    def _by_rows(self, record: Any) -> Any:
        """Yield row gradients, a few rows at a time: (rows of the batch, {name: [r, *shape]})."""
        layer: Layer = record.layer
        size = sum(self.layout.sizes[self.layout.names.index(name)] for name in layer.names.values())
        step = max(1, ROW_BUDGET // size)
        for start in range(0, len(record.x), step):
            stop = min(start + step, len(record.x))
            x, g = record.x[start:stop], record.g[start:stop]
            found = layer.row_gradients(x, g, self.like.dtype, num_texts=record.num_texts)
            yield slice(record.rows.start + start, record.rows.start + stop), found


class GradientSum(Accumulator):
    """The gradient of the log-likelihood, from VJPs with the scores at the data's labels."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        super().__init__(layout, like)
        self.sums = self._zeros()

    def add(self, record: Any) -> None:
        layer: Layer = record.layer
        record = record._replace(g=self._rooted(record.g, record.rows))
        if layer.linear:
            x, g = record.x.flatten(0, 1)[None], record.g.flatten(0, 1)[None]
            parts = [layer.row_gradients(x, g, self.like.dtype)]
        else:
            parts = [found for _, found in self._by_rows(record)]
        for found in parts:
            for name, value in found.items():
                self.sums[name] += value.sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.sums.values()

    def total(self) -> Tensor:
        """Return the gradient, [d]."""
        return self.layout.flatten(self.sums)

    def result(self) -> Curvature:
        raise AssertionError("a gradient is no curvature")


class DiagonalSum(Accumulator):
    """The diagonal sum g_i^2, module by module. A tensor that two modules share is squared at the end of the VJP.

    Args:
        names: the tensors to sum; None means all.
    """

    def __init__(self, layout: Layout, like: Tensor, names: Iterable[str] | None = None) -> None:
        super().__init__(layout, like)
        shapes = layout.named_shapes
        self.sums = {name: like.new_zeros(shapes[name]) for name in (layout.names if names is None else names)}
        self.shared: dict[str, Tensor] = {}

    def add(self, record: Any) -> None:
        require_once(record)
        for rows, found in self._by_rows(record):
            for name in [*found]:
                if name in record.layer.tied:
                    both = self.shared.setdefault(name, found[name].new_zeros(self.num_rows, *found[name].shape[1:]))
                    both[rows] += found[name]
                else:
                    self.sums[name] += self._moments(name, found.pop(name))

    def end_vjp(self) -> None:
        for name in [*self.shared]:
            self.sums[name] += self._moments(name, self.shared.pop(name))

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        """Return the sums [*shape] over ``rows``, and overwrite ``rows``: a copy would set the peak of memory."""
        return rows.square_().sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.sums.values()

    def result(self) -> Curvature:
        return DiagonalCurvature(self.layout.flatten(self.sums))


class RowSum(Accumulator):
    """The base of structures that mix modules: it holds the whole gradient [B, d] of each row of a VJP."""

    def begin(self, num_rows: int, weights: Tensor | None = None) -> None:
        super().begin(num_rows, weights)
        self.rows = self.like.new_zeros(num_rows, self.layout.dim)

    def add(self, record: Any) -> None:
        offsets = dict(zip(self.layout.names, torch.tensor([0, *self.layout.sizes]).cumsum(0).tolist(), strict=False))
        for rows, found in self._by_rows(record):
            for name, value in found.items():
                flat = value.flatten(1)
                self.rows[rows, offsets[name] : offsets[name] + flat.shape[1]] += flat

    def end_vjp(self) -> None:
        self._take(self.rows)
        self.rows.zero_()

    @abstractmethod
    def _take(self, rows: Tensor) -> None:
        """Add the row gradients [B, d] of a VJP."""


class FullSum(RowSum):
    """The dense sum g g'."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        super().__init__(layout, like)
        self.matrix = like.new_zeros(layout.dim, layout.dim)

    def tensors(self) -> Iterable[Tensor]:
        return [self.matrix]

    def _take(self, rows: Tensor) -> None:
        self.matrix.addmm_(rows.mT, rows)

    def result(self) -> FullCurvature:
        return FullCurvature(self.matrix)


class LowRankSum(RowSum):
    """The best rank-r part of sum g g', from one pass by a Nystroem sketch Y = H Omega (Tropp et al. 2017, alg. 3).

    It is exact if the rank of H is at most ``rank``. It holds two matrices [d, rank + 10], and at the end three more in
    float64.
    """

    def __init__(self, layout: Layout, like: Tensor, *, rank: int) -> None:
        super().__init__(layout, like)
        self.rank = min(rank, layout.dim)
        columns = min(rank + OVERSAMPLING, layout.dim)
        rng = generator("low_rank", layout.dim)
        self.omega = torch.randn(layout.dim, columns, generator=rng, dtype=like.dtype).to(like.device)
        self.sketch = torch.zeros_like(self.omega)

    def tensors(self) -> Iterable[Tensor]:
        return [self.sketch]

    def _take(self, rows: Tensor) -> None:
        self.sketch.addmm_(rows.mT, rows @ self.omega)

    def result(self) -> LowRankCurvature:
        norm = float(self.sketch.norm())
        if norm == 0:
            return LowRankCurvature(self.sketch[:, : self.rank])
        # float32 sums are solved in float64: the condition number of the sketch is the square of the data's
        sketch, omega = self.sketch.double(), self.omega.double()
        shift = torch.finfo(self.like.dtype).eps * norm
        core = omega.mT @ sketch
        shifted = (core + core.mT) / 2 + shift * (omega.mT @ omega)
        values, vectors = torch.linalg.eigh(shifted)
        keep = values > torch.finfo(self.like.dtype).eps * values[-1]
        sketch = sketch.add(omega, alpha=shift) if sketch is self.sketch else sketch.add_(omega, alpha=shift)
        del omega
        root = sketch @ (vectors[:, keep] * values[keep].rsqrt())
        del sketch
        tall, small = torch.linalg.qr(root)
        del root
        left, singular, _ = torch.linalg.svd(small)
        sizes = (singular.square() - shift).clamp_min(0)[: self.rank]
        return LowRankCurvature((tall @ (left[:, : self.rank] * sizes.sqrt())).to(self.like.dtype))


def require_once(record: Any) -> None:
    """Raise an ``UnsupportedModule`` if a module is called twice: the two calls would be squared separately."""
    if record.again:
        raise UnsupportedModule(
            f"{record.layer.path} is called more than once in a forward pass (layers that share weights): its row "
            "gradients are sums over the calls. Use structure='full' or 'low_rank', which hold whole rows"
        )
