"""Kronecker-factored sums and their correction: structures "kronecker" and "kronecker_corrected".

K-FAC (Martens and Grosse 2015) of a matrix that multiplies an input a and whose output has gradient g, with positions
shared as in Eschenhagen et al. 2023 (the g of one pull are of the row's summed loss):

    expand   H = (sum_np g g') (x) (sum_np a a') / (number of positions np)
    reduce   H = (sum_n (sum_p g)(sum_p g)') (x) (sum_n abar abar') / (number of rows n),   abar the mean over positions

Padding is no position. A classifier's head that scores every token has one position a row, the one that is read; a
causal model's head has one for each likelihood term.

"kronecker_corrected" (EK-FAC, George et al. 2018) keeps the eigenspaces of a K-FAC and replaces its eigenvalues by the
second moments of the rows' gradients there. Directions where a factor is 0 are one eigenspace, whose basis is
rounding's choice: they share the mean of their moments. With "expand" these are 0; with "reduce" they are not, since
sums and means over positions hold less than the positions do: keys without rotary positions have gradients that sum to
0 in every row. Sharing the mean is the projection (Frobenius) of the moments onto what is constant within eigenspaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.methods.laplace.accumulators import Accumulator, DiagonalSum, Module, Processes, require_once
from hf_bayes.methods.laplace.curvature import KroneckerCurvature, KroneckerFactors

NULL = 10
"""An eigenvalue below this times the rounding of the largest is 0: sums over 20 to 2000 batches, 8 to 768 wide, left
at most 2 there."""

CANCELLED = 100
"""A factor whose root is below this times the rounding of what cancelled in it is 0: keys without rotary positions, 4
to 256 wide and over 4 to 128 positions, left 1 to 6."""


class Spectrum(NamedTuple):
    """A factor [n, n], decomposed.

    Attributes:
        values: [n] eigenvalues, ascending.
        vectors: [n, n] eigenvectors in columns; None if the factor is diagonal.
        num_null: how many, the first, are 0 up to rounding, so that their vectors are any basis of what they span.
    """

    values: Tensor
    vectors: Tensor | None
    num_null: int


class CorrectedSum(DiagonalSum):
    """The diagonal in the eigenbasis of a K-FAC (George et al. 2018): the second pass of "kronecker_corrected".

    Args:
        spectra: name -> those of its two sides, for tensors that have factors.
    """

    def __init__(self, layout: Layout, like: Tensor, spectra: Mapping[str, tuple[Spectrum, Spectrum]]) -> None:
        super().__init__(layout, like)
        self.spectra = spectra

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        if name in self.spectra:
            left, right = (side.vectors for side in self.spectra[name])
            rows = rows if left is None else left.mT @ rows
            rows = rows if right is None else rows @ right
        return super()._moments(name, rows)

    def result(self) -> KroneckerCurvature:
        blocks: list[KroneckerFactors | Tensor] = []
        for name, values in self.sums.items():
            if name not in self.spectra:
                blocks.append(values.flatten())
                continue
            left, right = self.spectra[name]
            if left.num_null:
                values[: left.num_null] = values[: left.num_null].mean(0)
            if right.num_null:
                values[:, : right.num_null] = values[:, : right.num_null].mean(1, keepdim=True)
            blocks.append(KroneckerFactors(left.vectors, right.vectors, values))
        return KroneckerCurvature(tuple(blocks))


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
        factored = {tap.weight for tap in modules}
        self.rest = DiagonalSum(layout, like, [name for name in layout.names if name not in factored])
        self.inputs: dict[int, Tensor] = {}
        self.counts: dict[int, float] = {}
        self.outputs: dict[str, Tensor] = {}
        self.sizes: dict[int | str, Tensor] = {}
        self.sources: dict[str, tuple[int, bool]] = {}
        self.fallbacks = _fallbacks(layout, modules, max_factor)

    def begin(self, num_rows: int) -> None:
        self.rest.begin(num_rows)

    def end_pull(self) -> None:
        self.rest.end_pull()

    def add(self, share: Any) -> None:
        require_once(share)
        tap: Module = share.tap
        if tap.weight is None or len(tap.names) > 1:
            self.rest.add(share._replace(tap=_Without(tap)))
        if tap.weight is None:
            return
        valid = share.valid
        g = share.g.to(self.like.dtype)
        if self.sharing == "reduce":
            self._add_size(tap.weight, g.abs().sum(1))
        rows = g.sum(1) if self.sharing == "reduce" else g.flatten(0, 1)  # g is 0 at padding
        self._add_moment(self.outputs, tap.weight, rows)
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
            x = x * (weight / count.clamp_min(1))[..., None]
            self._add_size(own, x.abs().sum(1))
            rows = x.sum(1)
            number = float((count > 0).sum())
        else:
            rows = x.flatten(0, 1) if valid is None else x[valid]
            number = float(len(rows))
        self._add_moment(self.inputs, own, rows)
        self.counts[own] = self.counts.get(own, 0.0) + number

    def tensors(self) -> Iterable[Tensor]:
        return [
            *(self.outputs[name] for name in self.sources),
            *(self.inputs[source] for source in sorted(self.inputs)),
            *(self.sizes[name] for name in self.sources if name in self.sizes),
            *(self.sizes[source] for source in sorted(self.inputs) if source in self.sizes),
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
            for key in (name, source) if self.sharing == "reduce" else ():
                self.sizes.setdefault(key, self.like.new_zeros(()))
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

    def _add_moment(self, sums: dict[Any, Tensor], key: Any, rows: Tensor) -> None:
        """In place: of a factor there is never a second copy."""
        if key not in sums:
            sums[key] = self._no_moment(rows.shape[1])
        if sums[key].ndim == 1:
            sums[key] += rows.square().sum(0)
        else:
            sums[key].addmm_(rows.mT, rows)

    def _add_size(self, key: int | str, rows: Tensor) -> None:
        """What a factor's trace would be if nothing cancelled in the sums over positions."""
        self.sizes[key] = self.sizes.get(key, 0) + rows.square().sum()

    def _spectra(self) -> dict[str, tuple[Spectrum, Spectrum]]:
        """Of the two sides of each matrix, row by row. The factors are given up, one by one."""
        inputs = {source: self._spectrum(self.inputs, source) for source in [*self.inputs]}
        spectra = {}
        for name, (source, transposed) in self.sources.items():
            left, right = self._spectrum(self.outputs, name), inputs[source]
            spectra[name] = (right, left) if transposed else (left, right)
        return spectra

    def _spectrum(self, factors: dict[Any, Tensor], key: Any) -> Spectrum:
        factor = factors.pop(key)
        if factor.ndim == 1:
            return Spectrum(factor, None, 0)
        dtype, eps = factor.dtype, torch.finfo(factor.dtype).eps
        wide = factor.double()
        del factor
        values, vectors = torch.linalg.eigh(wide)
        del wide
        null = max(NULL * eps * float(values[-1]), (CANCELLED * eps) ** 2 * float(self.sizes.get(key, 0.0)))
        return Spectrum(values.clamp_min(0).to(dtype), vectors.to(dtype), int((values <= null).sum()))

    def result(self) -> KroneckerCurvature:
        """K-FAC. The factors are given up: once."""
        counts = {name: max(self.counts[source], 1.0) for name, (source, _) in self.sources.items()}
        spectra = self._spectra()
        blocks: list[KroneckerFactors | Tensor] = []
        for name, shape in self.layout.named_shapes.items():
            if name in spectra:
                left, right = spectra[name]
                values = left.values[:, None] * right.values / counts[name]
                blocks.append(KroneckerFactors(left.vectors, right.vectors, values))
            else:  # a matrix that no gradient reached has no factors either
                blocks.append(self.rest.sums.get(name, self.like.new_zeros(shape)).flatten())
        return KroneckerCurvature(tuple(blocks))

    def corrected(self) -> CorrectedSum:
        """What takes the second pass. The factors are given up: once, and there is no ``result`` then."""
        return CorrectedSum(self.layout, self.like, self._spectra())


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
