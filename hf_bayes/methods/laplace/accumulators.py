"""From pulls to H: what each structure keeps of (input, output gradient) while the data stream by.

Everything kept is a sum over rows, so batches, accumulation and processes do not matter: sums add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.curvature import (
    Curvature,
    DiagonalCurvature,
    FullCurvature,
    LowRankCurvature,
)

ROW_BUDGET = 1 << 26
"""Numbers of row gradients of one module held at once; a single row is never split."""

OVERSAMPLING = 10
"""Columns of the sketch beyond the rank."""


class Module(Protocol):
    """What an accumulator asks of a tapped module (``members.taps.Tap``)."""

    path: str
    names: dict[str, str]
    weight: str | None
    transposed: bool
    linear: bool
    tied: set[str]

    def row_gradients(self, x: Tensor, g: Tensor, dtype: torch.dtype) -> dict[str, Tensor]: ...


class Processes(Protocol):
    """Those that see other rows of the same data (``distributed.ChainMesh``)."""

    def sum_over_data(self, tensor: Tensor) -> Tensor: ...

    def share(self, value: Any) -> list[Any]: ...


class Accumulator(ABC):
    """Sums over pulls. ``add`` takes ``members.taps.Share``s, ``end_pull`` follows the last one of each pull."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self.layout, self.like = layout, like

    @abstractmethod
    def add(self, share: Any) -> None: ...

    def end_pull(self) -> None:  # noqa: B027  sums over modules need not know
        """All modules of a pull, over all rows of the batch, have been added."""

    @abstractmethod
    def result(self) -> Curvature: ...

    def begin(self, num_rows: int) -> None:  # noqa: B027
        """A batch of ``num_rows`` rows begins."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """The sums."""

    def sum_over(self, processes: Processes) -> None:
        """Add what others found in their rows."""
        for tensor in self.tensors():
            processes.sum_over_data(tensor)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: self.like.new_zeros(shape) for name, shape in self.layout.named_shapes.items()}

    def _by_rows(self, share: Any) -> Any:
        """Row gradients of a share, a few rows at a time: (rows of the batch, {name: [r, *shape]})."""
        tap: Module = share.tap
        size = sum(self.layout.sizes[self.layout.names.index(name)] for name in tap.names.values())
        step = max(1, ROW_BUDGET // size)
        for start in range(0, len(share.x), step):
            stop = min(start + step, len(share.x))
            found = tap.row_gradients(share.x[start:stop], share.g[start:stop], self.like.dtype)
            yield slice(share.rows.start + start, share.rows.start + stop), found


class GradientSum(Accumulator):
    """The gradient of the log-likelihood, from pulls of the scores at the data's labels."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        super().__init__(layout, like)
        self.sums = self._zeros()

    def add(self, share: Any) -> None:
        tap: Module = share.tap
        x, g = (share.x.flatten(0, 1)[None], share.g.flatten(0, 1)[None]) if tap.linear else (share.x, share.g)
        for name, value in tap.row_gradients(x, g, self.like.dtype).items():
            self.sums[name] += value.sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.sums.values()

    def total(self) -> Tensor:
        """[d]"""
        return self.layout.flatten(self.sums)

    def result(self) -> Curvature:
        raise AssertionError("a gradient is no curvature")


class DiagonalSum(Accumulator):
    """sum g_i^2, module by module; a tensor that two modules own waits until both have spoken.

    Args:
        names: tensors that will be added; None is all.
    """

    def __init__(self, layout: Layout, like: Tensor, names: Iterable[str] | None = None) -> None:
        super().__init__(layout, like)
        shapes = layout.named_shapes
        self.sums = {name: like.new_zeros(shapes[name]) for name in (layout.names if names is None else names)}
        self.num_rows = 0
        self.waiting: dict[str, Tensor] = {}

    def begin(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def add(self, share: Any) -> None:
        require_once(share)
        for rows, found in self._by_rows(share):
            for name in [*found]:
                if name in share.tap.tied:
                    both = self.waiting.setdefault(name, found[name].new_zeros(self.num_rows, *found[name].shape[1:]))
                    both[rows] += found[name]
                else:
                    self.sums[name] += self._moments(name, found.pop(name))

    def end_pull(self) -> None:
        for name in [*self.waiting]:
            self.sums[name] += self._moments(name, self.waiting.pop(name))

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        """[*shape]: sums over ``rows``, which are used up: several of that size would be the most that a pass holds."""
        return rows.square_().sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.sums.values()

    def result(self) -> Curvature:
        return DiagonalCurvature(self.layout.flatten(self.sums))


class RowSum(Accumulator):
    """Holds the whole gradient [B, d] of each row of a pull, for structures that mix modules."""

    def begin(self, num_rows: int) -> None:
        self.rows = self.like.new_zeros(num_rows, self.layout.dim)

    def add(self, share: Any) -> None:
        starts = dict(zip(self.layout.names, torch.tensor([0, *self.layout.sizes]).cumsum(0).tolist(), strict=False))
        for rows, found in self._by_rows(share):
            for name, value in found.items():
                flat = value.flatten(1)
                self.rows[rows, starts[name] : starts[name] + flat.shape[1]] += flat

    def end_pull(self) -> None:
        self._take(self.rows)
        self.rows.zero_()

    @abstractmethod
    def _take(self, rows: Tensor) -> None: ...


class FullSum(RowSum):
    """sum g g', dense."""

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
    """The best rank-r part of sum g g' from one pass: a Nystroem sketch Y = H Omega (Tropp et al. 2017, alg. 3).

    Exact where H has a rank of at most ``rank``. Holds two matrices [d, rank + 10], and at the end three more in
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
        # float32 sums are solved in float64: the sketch's condition number is the square of the data's
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


def require_once(share: Any) -> None:
    """A module's second call would be squared apart from its first."""
    if share.again:
        raise ValueError(
            f"{share.tap.path} is called more than once in a forward pass (layers that share weights): its row "
            "gradients are sums over the calls. Use structure='full' or 'low_rank', which hold whole rows"
        )
