"""From pulls to H: what each structure keeps of (input, output gradient) while the data stream by.

Everything kept is a sum over rows, so batches, accumulation and processes do not matter: sums add up.

K-FAC (Martens and Grosse 2015) of a matrix that multiplies an input a and whose output has gradient g, with positions
shared as in Eschenhagen et al. 2023 (the g of one pull are of the row's summed loss):

    expand   H = (sum_np g g') (x) (sum_np a a') / (number of positions np)
    reduce   H = (sum_n (sum_p g)(sum_p g)') (x) (sum_n abar abar') / (number of rows n),   abar the mean over positions

Padding is no position. A classifier's head that scores every token has one position a row, the one that is read; a
causal model's head has one for each likelihood term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.laplace.curvature import (
    Curvature,
    DiagonalCurvature,
    FullCurvature,
    KroneckerCurvature,
    KroneckerFactors,
    LowRankCurvature,
)
from hf_bayes.rng import generator
from hf_bayes.subspace import Layout

ROW_BUDGET = 1 << 26
"""Numbers of row gradients of one module held at once; a single row is never split."""

MAX_FULL = 8192
"""d past which a dense [d, d] is refused."""

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
    """sum g_i^2, module by module; a tensor that two modules own waits until both have spoken."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        super().__init__(layout, like)
        self.sums, self.num_rows = self._zeros(), 0
        self.waiting: dict[str, Tensor] = {}

    def begin(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def add(self, share: Any) -> None:
        _require_once(share)
        for rows, found in self._by_rows(share):
            for name, value in found.items():
                if name in share.tap.tied:
                    both = self.waiting.setdefault(name, value.new_zeros(self.num_rows, *value.shape[1:]))
                    both[rows] += value
                else:
                    self.sums[name] += self._moments(name, value)

    def end_pull(self) -> None:
        for name, value in self.waiting.items():
            self.sums[name] += self._moments(name, value)
        self.waiting = {}

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        return rows.square().sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.sums.values()

    def result(self) -> DiagonalCurvature:
        return DiagonalCurvature(self.layout.flatten(self.sums))


class CorrectedSum(DiagonalSum):
    """The diagonal in the eigenbasis of a K-FAC (George et al. 2018): the second pass of "kronecker_corrected"."""

    def __init__(self, layout: Layout, like: Tensor, basis: KroneckerCurvature) -> None:
        super().__init__(layout, like)
        self.blocks = dict(zip(layout.names, basis.blocks, strict=True))

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        block = self.blocks[name]
        if isinstance(block, Tensor):
            return super()._moments(name, rows)
        rows = rows if block.left is None else block.left.mT @ rows
        return super()._moments(name, rows if block.right is None else rows @ block.right)

    def result(self) -> Any:
        return KroneckerCurvature(
            tuple(
                self.sums[name].flatten()
                if isinstance(b, Tensor)
                else KroneckerFactors(b.left, b.right, self.sums[name])
                for name, b in self.blocks.items()
            )
        )


class KroneckerSum(Accumulator):
    """K-FAC where a module multiplies by a matrix, the diagonal elsewhere.

    Args:
        sharing: "expand" or "reduce".
        max_factor: largest side of a factor; the factor of a longer side is diagonal.
        modules: all that will be tapped.
    """

    def __init__(
        self, layout: Layout, like: Tensor, modules: Sequence[Module], *, sharing: str, max_factor: int
    ) -> None:
        super().__init__(layout, like)
        self.sharing, self.max_factor = sharing, max_factor
        self.rest = DiagonalSum(layout, like)
        self.inputs: dict[int, Tensor] = {}
        self.counts: dict[int, float] = {}
        self.outputs: dict[str, Tensor] = {}
        self.sources: dict[str, tuple[int, bool]] = {}
        self.fallbacks = _fallbacks(layout, modules, max_factor)

    def begin(self, num_rows: int) -> None:
        self.rest.begin(num_rows)

    def end_pull(self) -> None:
        self.rest.end_pull()

    def add(self, share: Any) -> None:
        _require_once(share)
        tap: Module = share.tap
        if tap.weight is None or len(tap.names) > 1:
            self.rest.add(share._replace(tap=_Without(tap)))
        if tap.weight is None:
            return
        valid = share.valid
        g = share.g.to(self.like.dtype)
        rows = g.sum(1) if self.sharing == "reduce" else g.flatten(0, 1)  # g is 0 at padding
        self.outputs[tap.weight] = self.outputs.get(tap.weight, 0) + self._moment(rows)
        self.sources.setdefault(tap.weight, (share.source, tap.transposed))
        if self.sources[tap.weight][0] != share.source:
            raise ValueError(f"{tap.path} reads another module's input in one batch and its own in another: use "
                             "structure='diagonal' for this model")  # fmt: skip
        own = self.sources[tap.weight][0]
        if not share.first or self._owners().get(own) != tap.weight:
            return
        x = share.x.to(self.like.dtype)
        if self.sharing == "reduce":
            weight = torch.ones_like(x[..., 0]) if valid is None else valid.to(x.dtype)
            count = weight.sum(1, keepdim=True)
            rows = (x * weight[..., None]).sum(1) / count.clamp_min(1)
            number = float((count > 0).sum())
        else:
            rows = x.flatten(0, 1) if valid is None else x[valid]
            number = float(len(rows))
        self.inputs[own] = self.inputs.get(own, 0) + self._moment(rows)
        self.counts[own] = self.counts.get(own, 0.0) + number

    def tensors(self) -> Iterable[Tensor]:
        return [
            *(self.outputs[name] for name in self.sources),
            *(self.inputs[source] for source in sorted(self.inputs)),
            *self.rest.tensors(),
        ]

    def sum_over(self, processes: Processes) -> None:
        # rows without a likelihood term never reach a language model's head: a process may have met fewer modules
        self.sources = {name: source for found in processes.share(self.sources) for name, source in found.items()}
        shapes = self.layout.named_shapes
        for name, (source, transposed) in self.sources.items():
            width, length = reversed(shapes[name]) if transposed else shapes[name]
            self.outputs.setdefault(name, self._no_moment(width))
            self.inputs.setdefault(source, self._no_moment(length))
        counts = torch.tensor([self.counts.get(source, 0.0) for source in sorted(self.inputs)], dtype=torch.float64)
        counts = processes.sum_over_data(counts.to(self.like.device))
        self.counts = dict(zip(sorted(self.inputs), counts.tolist(), strict=True))
        super().sum_over(processes)

    def _no_moment(self, size: int) -> Tensor:
        return self.like.new_zeros(size if size > self.max_factor else (size, size))

    def _owners(self) -> dict[int, str]:
        """source -> the one of its weights that adds up its factor."""
        owners: dict[int, str] = {}
        for name, (source, _) in self.sources.items():
            owners.setdefault(source, name)
        return owners

    def _moment(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0) if rows.shape[1] > self.max_factor else rows.mT @ rows

    def result(self) -> KroneckerCurvature:
        rest = self.layout.unflatten(self.rest.result().values)
        spectra = {source: _spectrum(factor) for source, factor in self.inputs.items()}
        blocks: list[KroneckerFactors | Tensor] = []
        for name in self.layout.names:
            if name not in self.outputs:
                blocks.append(rest[name].flatten())
                continue
            source, transposed = self.sources[name]
            pair = [_spectrum(self.outputs[name]), spectra[source]]
            (left_values, left), (right_values, right) = reversed(pair) if transposed else pair
            values = left_values[:, None] * right_values / max(self.counts[source], 1.0)
            blocks.append(KroneckerFactors(left, right, values))
        return KroneckerCurvature(tuple(blocks))


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
        if layout.dim > MAX_FULL:
            raise ValueError(
                f"structure='full' holds a matrix of {layout.dim} x {layout.dim}; the limit is {MAX_FULL}: choose a "
                "smaller subspace, or structure 'kronecker', 'low_rank' or 'diagonal'"
            )
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


class _Without:
    """A module without its Kronecker-factored matrix: what is left of it is kept diagonally."""

    def __init__(self, tap: Module) -> None:
        self.tap = tap
        self.names = {key: name for key, name in tap.names.items() if name != tap.weight}
        self.tied = tap.tied

    def row_gradients(self, x: Tensor, g: Tensor, dtype: torch.dtype) -> Mapping[str, Tensor]:
        if self.tap.weight is not None:  # a bias is all there is beside a matrix
            return {self.names["bias"]: g.to(dtype).sum(1)}
        return self.tap.row_gradients(x, g, dtype)


def _require_once(share: Any) -> None:
    """A module's second call would be squared apart from its first."""
    if share.again:
        raise ValueError(
            f"{share.tap.path} is called more than once in a forward pass (layers that share weights): its row "
            "gradients are sums over the calls. Use structure='full' or 'low_rank', which hold whole rows"
        )


def _fallbacks(layout: Layout, modules: Sequence[Module], max_factor: int) -> dict[str, str]:
    """{parameter name: why it is kept diagonally, in whole or in part}."""
    found = {}
    shapes = layout.named_shapes
    for tap in modules:
        for attribute, name in tap.names.items():
            if name in tap.tied:
                found[name] = "tied: two modules own it"
            elif not tap.linear:
                found[name] = "no matrix product (norm or embedding)"
            elif attribute == "bias":
                found[name] = "bias"
            elif max(shapes[name]) > max_factor:
                sides = "both sides" if min(shapes[name]) > max_factor else "one side"
                found[name] = f"{sides} longer than max_factor={max_factor}: diagonal there"
    return found


def _spectrum(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors of a factor; of a diagonal one [n] its values and None."""
    if factor.ndim == 1:
        return factor, None
    values, vectors = torch.linalg.eigh(factor.double())
    return values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype)
