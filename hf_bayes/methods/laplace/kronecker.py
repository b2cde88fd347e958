"""Kronecker-factored sums and their correction: the structures "kronecker" and "kronecker_corrected".

K-FAC (Martens and Grosse 2015) of a matrix with input a and output gradient g, where positions share the matrix as in
Eschenhagen et al. 2023 (the g of one VJP are gradients of the row's summed loss):

    expand   H = (sum_np g g') (x) (sum_np a a') / (number of positions np)
    reduce   H = (sum_n (sum_p g)(sum_p g)') (x) (sum_n abar abar') / (number of rows n),   abar the mean over positions

If a row has several texts, such as a pair of answers, "reduce" sums and averages over the positions of each text, and n
counts texts. Over all positions of a pair the sum would be a difference of two, and 0 for a head that reads both texts
alike.

Padding does not count as a position. A classifier's head that scores every token has one position per row, the one
that is used. A causal model's head has one position for each likelihood term.

A row of weight w counts w times in both sums and in np and n, as w copies of it would.

"kronecker_corrected" (EK-FAC, George et al. 2018) keeps the eigenspaces of a K-FAC and replaces its eigenvalues by the
second moments of the rows' gradients in these spaces. All directions in which a factor is 0 form one eigenspace.
Rounding determines its basis, so these directions share the mean of their moments. With "expand" the moments are 0.
With "reduce" they are not, since sums and means over positions lose information: keys without rotary positions have
gradients that sum to 0 in every row. The shared mean is the projection (Frobenius) of the moments onto those that are
constant within eigenspaces.

The curvature of a bias is diagonal, or with ``bias="factor"`` the left factor of its module's matrix, sum_np g g' or
sum_n (sum_p g)(sum_p g)', as a dense block of its own. With one position per row this block is exact. laplace-torch has
it, so its log evidence is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.methods.laplace.accumulators import (
    Accumulator,
    DiagonalSum,
    Layer,
    Processes,
    UnsupportedModule,
    require_once,
)
from hf_bayes.methods.laplace.kronecker_curvature import DiagonalFactor, KroneckerCurvature, KroneckerFactors

NULL = 10
"""An eigenvalue below this multiple of the rounding error of the largest one counts as 0.

Sums over 20 to 2000 batches of width 8 to 768 left multiples of at most 2.
"""

CANCELLED = 100
"""A factor whose root is below this multiple of the rounding error of its cancelled terms counts as 0.

Keys without rotary positions, of width 4 to 256 and with 4 to 128 positions, left multiples of 1 to 6.
"""


class Spectrum(NamedTuple):
    """The eigendecomposition of a factor [n, n].

    Attributes:
        values: [n] eigenvalues, ascending.
        vectors: [n, n] eigenvectors in columns; None if the factor is diagonal.
        num_null: number of eigenvalues that are 0 up to rounding. They come first, and their vectors are an arbitrary
            basis of one space.
    """

    values: Tensor
    vectors: Tensor | None
    num_null: int


class CorrectedSum(DiagonalSum):
    """The diagonal in the eigenbasis of a K-FAC (George et al. 2018): the second pass of "kronecker_corrected".

    Args:
        spectra: name -> the spectra of both factors, for tensors that have factors.
    """

    def __init__(self, layout: Layout, like: Tensor, spectra: Mapping[str, tuple[Spectrum, Spectrum]]) -> None:
        super().__init__(layout, like)
        self.spectra = spectra

    def _moments(self, name: str, rows: Tensor) -> Tensor:
        if name in self.spectra:
            left, right = (side.vectors for side in self.spectra[name])
            shape = rows.shape[1:]
            rows = rows.view(len(rows), len(self.spectra[name][0].values), -1)
            rows = rows if left is None else left.mT @ rows
            rows = (rows if right is None else rows @ right).view(-1, *shape)
        return super()._moments(name, rows)

    def result(self) -> KroneckerCurvature:
        blocks: list[KroneckerFactors | DiagonalFactor] = []
        for name, values in self.sums.items():
            if name not in self.spectra:
                blocks.append(DiagonalFactor(values.flatten()))
                continue
            left, right = self.spectra[name]
            values = values.view(len(left.values), len(right.values))  # a bias is a matrix of one column
            if left.num_null:
                values[: left.num_null] = values[: left.num_null].mean(0)
            if right.num_null:
                values[:, : right.num_null] = values[:, : right.num_null].mean(1, keepdim=True)
            blocks.append(KroneckerFactors(left.vectors, right.vectors, values))
        return KroneckerCurvature(tuple(blocks))


class KroneckerSum(Accumulator):
    """The sums of K-FAC for modules that multiply by a matrix, and the diagonal for other tensors.

    Args:
        sharing: "expand" or "reduce".
        max_factor: largest side of a factor; the factor of a longer side is diagonal.
        layers: all modules that are recorded.
        bias: "diagonal", or "factor": the left factor of the bias's module, if its matrix is random.
    """

    def __init__(
        self,
        layout: Layout,
        like: Tensor,
        layers: Sequence[Layer],
        *,
        sharing: str,
        max_factor: int,
        bias: str = "diagonal",
    ) -> None:
        super().__init__(layout, like)
        self.sharing, self.max_factor = sharing, max_factor
        self.biases = {}
        if bias == "factor":
            self.biases = {
                layer.names["bias"]: layer.weight
                for layer in layers
                if layer.weight is not None
                and layer.names.keys() > {"weight"}
                and layer.names["bias"] not in layer.tied
            }
        factored = {layer.weight for layer in layers} | set(self.biases)
        self.rest = DiagonalSum(layout, like, [name for name in layout.names if name not in factored])
        self.inputs: dict[int, Tensor] = {}
        self.counts: dict[int, float] = {}
        self.outputs: dict[str, Tensor] = {}
        self.sizes: dict[int | str, Tensor] = {}
        self.sources: dict[str, tuple[int, bool]] = {}
        found = _fallbacks(layout, layers, max_factor)
        self.fallbacks = {name: reason for name, reason in found.items() if self.biases.get(name) in (None, *found)}

    def begin(self, num_rows: int, weights: Tensor | None = None) -> None:
        super().begin(num_rows, weights)
        self.rest.begin(num_rows, weights)

    def end_vjp(self) -> None:
        self.rest.end_vjp()

    def add(self, record: Any) -> None:
        require_once(record)
        layer: Layer = record.layer
        if layer.weight is None or not set(layer.names.values()) <= {layer.weight, *self.biases}:
            self.rest.add(record._replace(layer=_WithoutMatrix(layer)))
        if layer.weight is None:
            return
        valid = record.valid
        g = record.g.to(self.like.dtype)
        if self.sharing == "reduce":  # the texts of a row are reduced one by one
            g = by_text(g, record.num_texts)
            valid = None if valid is None else by_text(valid, record.num_texts)
        if self.sharing == "reduce":
            self._add_size(layer.weight, g.abs().sum(1))
        rows = g.sum(1) if self.sharing == "reduce" else g.flatten(0, 1)  # g is 0 at padding
        self._add_moment(self.outputs, layer.weight, rows)
        self.sources.setdefault(layer.weight, (record.source, layer.transposed))
        if self.sources[layer.weight][0] != record.source:
            raise UnsupportedModule(
                f"{layer.path} shares its input with another module in some batches and not in others: use "
                "structure='diagonal' for this model"
            )
        own = self.sources[layer.weight][0]
        if not record.first or self._owners().get(own) != layer.weight:
            return
        x = self._rooted(record.x.to(self.like.dtype), record.rows)
        copies = self._rooted(self._rooted(x.new_ones(x.shape[:2]), record.rows), record.rows)  # [R, P] weights
        if self.sharing == "reduce":
            x, copies = by_text(x, record.num_texts), by_text(copies, record.num_texts)
            used = torch.ones_like(x[..., 0]) if valid is None else valid.to(x.dtype)
            count = used.sum(1, keepdim=True)
            x = x * (used / count.clamp_min(1))[..., None]
            self._add_size(own, x.abs().sum(1))
            rows = x.sum(1)
            number = float(copies[:, :1][count > 0].sum())
        else:
            rows = x.flatten(0, 1) if valid is None else x[valid]
            counted = copies if valid is None else copies[valid]
            number = float(len(rows) if self.roots is None else counted.sum())  # a sum waits for the device
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
        # rows without a likelihood term never reach a language model's head: a process may have seen fewer modules
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
        """Return a factor of zeros, diagonal if its side is longer than ``max_factor``."""
        return self.like.new_zeros(size if size > self.max_factor else (size, size))

    def _owners(self) -> dict[int, str]:
        """Return source -> the weight that accumulates the factor of this input."""
        owners: dict[int, str] = {}
        for name, (source, _) in self.sources.items():
            owners.setdefault(source, name)
        return owners

    def _add_moment(self, sums: dict[Any, Tensor], key: Any, rows: Tensor) -> None:
        """Add to a factor in place, so that no second copy exists."""
        if key not in sums:
            sums[key] = self._no_moment(rows.shape[1])
        if sums[key].ndim == 1:
            sums[key] += rows.square().sum(0)
        else:
            sums[key].addmm_(rows.mT, rows)

    def _add_size(self, key: int | str, rows: Tensor) -> None:
        """Add to the trace that a factor would have without cancellation in the sums over positions."""
        self.sizes[key] = self.sizes.get(key, 0) + rows.square().sum()

    def _spectra(self) -> dict[str, tuple[Spectrum, Spectrum]]:
        """Return the spectra (left, right) of each matrix. Each factor is freed after its decomposition."""
        inputs = {source: self._spectrum(self.inputs, source) for source in [*self.inputs]}
        spectra = {}
        biases = {weight: bias for bias, weight in self.biases.items()}
        for name, (source, transposed) in self.sources.items():
            left, right = self._spectrum(self.outputs, name), inputs[source]
            spectra[name] = (right, left) if transposed else (left, right)
            if name in biases:
                spectra[biases[name]] = (left, Spectrum(left.values.new_ones(1), None, 0))
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
        """Return the K-FAC curvature. This frees the factors, so it works only once."""
        counts = {name: self.counts[source] or 1.0 for name, (source, _) in self.sources.items()}
        counts |= dict.fromkeys(self.biases, 1.0)
        spectra = self._spectra()
        blocks: list[KroneckerFactors | DiagonalFactor] = []
        for name, shape in self.layout.named_shapes.items():
            if name in spectra:
                left, right = spectra[name]
                values = left.values[:, None] * right.values / counts[name]
                blocks.append(KroneckerFactors(left.vectors, right.vectors, values))
            else:  # a matrix that no gradient reached has no factors
                values = self.rest.sums.get(name, self.like.new_zeros(shape))
                blocks.append(DiagonalFactor(values.flatten()))
        return KroneckerCurvature(tuple(blocks))

    def corrected(self) -> CorrectedSum:
        """Return the accumulator of the second pass. This frees the factors, and ``result`` is no longer available."""
        return CorrectedSum(self.layout, self.like, self._spectra())


def by_text(values: Tensor, num_texts: int) -> Tensor:
    """Return [R K, P / K, ...], the texts of all rows, given rows [R, P, ...] with K texts side by side."""
    texts: Tensor = values.unflatten(1, (num_texts, -1))
    return texts.flatten(0, 1)


class _WithoutMatrix:
    """A module without its Kronecker-factored matrix. The curvature of its other tensors is diagonal."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.names = {key: name for key, name in layer.names.items() if name != layer.weight}
        self.tied = layer.tied

    def row_gradients(self, x: Tensor, g: Tensor, dtype: torch.dtype, *, num_texts: int = 1) -> Mapping[str, Tensor]:
        if self.layer.weight is not None:  # a module with a matrix has no other tensor than a bias
            return {self.names["bias"]: g.to(dtype).sum(1)}
        return self.layer.row_gradients(x, g, dtype, num_texts=num_texts)


def _fallbacks(layout: Layout, layers: Sequence[Layer], max_factor: int) -> dict[str, str]:
    """Return {parameter name: the reason for a diagonal in place of factors, in whole or in part}."""
    found = {}
    shapes = layout.named_shapes
    for layer in layers:
        for attribute, name in layer.names.items():
            if name in layer.tied:
                found[name] = "tied: two modules own it"
            elif not layer.linear:
                found[name] = "no matrix product (norm, embedding or convolution)"
            elif attribute == "bias":
                found[name] = "bias"
            elif max(shapes[name]) > max_factor:
                sides = "both sides" if min(shapes[name]) > max_factor else "one side"
                found[name] = f"{sides} longer than max_factor={max_factor}: diagonal there"
    return found
