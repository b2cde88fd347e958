"""J V J' from the inputs and the output gradients of a model's layers, without J [C, d] of a row.

A weight W [m, n] is read at positions t with inputs a_t. g_ct is the gradient of output c in W a_t, and the Jacobian of
a row is J_c = sum_t g_ct a_t'. Every diagonal or Kronecker-factored V of W is (L (x) R) diag(v) (L (x) R)'. With
g~ = L' g and a~ = R' a

    (J V J')_cd = sum_ij v_ij (sum_t g~_cti a~_tj) (sum_s g~_dsi a~_sj)
                = sum_ts sum_i g~_cti g~_dsi M_its,    M_its = sum_j v_ij a~_tj a~_sj

The second line costs P^2 m n for P positions, in one large product over all rows. The first line costs C P m n in many
small ones, a few rows of J~ at a time. Only positions with a gradient count. A classifier that reads its first or last
position has one such position in most layers of its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import Covariance, Diagonal, DiagonalBlock, Kronecker, KroneckerBlock
from hf_bayes.members.module_hooks import HookedLayer, LayerRecord
from hf_bayes.members.sparse_backward import rows_with_gradient
from hf_bayes.models.linearised.output_covariance import JACOBIAN_BUDGET, covariance_of_outputs

MAX_PAIRED = 8
"""The largest number of positions whose pairs are formed.

On a CPU, pairs of 8 positions took half the time of the Jacobian (3 and 6 outputs, widths 384 and 1536), and pairs of
16 positions took more time.
"""

NARROW = 64
"""The largest number of inputs of a matrix whose Jacobian is formed at once, as of LoRA's factor B."""

BLOCK_ELEMENTS = {"cpu": 1 << 18}
"""The number of elements of an intermediate tensor: 1 MB of float32 stays in the caches of a CPU core."""


class LayerReads(NamedTuple):
    """The inputs and the output gradients of one call of a layer.

    Attributes:
        layer: the layer.
        x: [B, P, in] its input (embeddings: ids [B, P]).
        g: [C, B, P, out] the gradient of each of the model's outputs in the output of the layer.
        num_texts: the number of texts in a row; its positions are those of the texts side by side.
    """

    layer: HookedLayer
    x: Tensor
    g: Tensor
    num_texts: int = 1


def over_inputs(record: LayerRecord, dtype: torch.dtype) -> LayerRecord:
    """Return a record of the same Jacobian with one position for each of few inputs, if that is smaller.

    sum_t g_t a_t' = sum_j (sum_t a_tj g_t) e_j', which is true of a weight matrix, and not of a bias.

    Args:
        record: x [B, P, n] and g [B, P, out], which become [B, n, n] and [B, n, out].
        dtype: the dtype of the sums.
    """
    layer, x = record.layer, record.x
    if not layer.linear or "bias" in layer.names or not x.shape[2] < x.shape[1] or x.shape[2] > NARROW:
        return record
    units = torch.eye(x.shape[2], dtype=dtype, device=x.device).expand(len(x), -1, -1)
    return record._replace(x=units, g=x.to(dtype).mT @ record.g.to(dtype))


def read_positions(layer: HookedLayer, x: Tensor, gradients: Sequence[Tensor], num_texts: int = 1) -> LayerReads:
    """Return a record of the positions with a gradient. Rows with fewer of them are filled up with other positions.

    Args:
        layer: the layer.
        x: [B, P, in], or ids [B, P].
        gradients: C tensors [B, P, out].
        num_texts: the number of texts in a row.
    """
    if not layer.linear or bool(gradients[0][..., 0].all()):  # so each position has a gradient
        return LayerReads(layer, x, _stacked(gradients), num_texts)
    read = torch.stack([rows_with_gradient(g) for g in gradients]).any(0)
    number = max(1, int(read.sum(1).max()))
    if number == read.shape[1]:
        return LayerReads(layer, x, _stacked(gradients), num_texts)
    chosen = read.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :number, None]
    return LayerReads(layer, x.take_along_dim(chosen, 1), _stacked([g.take_along_dim(chosen, 1) for g in gradients]))


def _stacked(gradients: Sequence[Tensor]) -> Tensor:
    """Return [C, B, P, out] in the order [B, P, C, out] of ``by_jacobian``; images have more dimensions behind C."""
    return torch.stack(list(gradients), 2).movedim(2, 0)


@singledispatch
def covariance_of_layers(covariance: Covariance, layout: Layout, reads: Sequence[LayerReads], like: Tensor) -> Tensor:
    """Return [B, C, C] J V J' in the dtype of ``like``.

    A covariance that mixes tensors (low rank, full) takes J, of as many rows as ``JACOBIAN_BUDGET`` allows.
    """
    num_outputs, num_rows = reads[0].g.shape[:2]
    step = max(1, JACOBIAN_BUDGET // (layout.dim * num_outputs))
    parts = []
    for rows in _slices(num_rows, step):
        # a tensor that no layer reads, as of a disabled adapter, has no part in the outputs
        b = len(range(num_rows)[rows])
        jacobian = {name: like.new_zeros(b, num_outputs, *shape) for name, shape in layout.named_shapes.items()}
        for read in reads:
            for name, value in _row_gradients(read, rows, like).items():
                jacobian[name] = jacobian[name] + value
        parts.append(covariance_of_outputs(covariance, layout, jacobian))
    return torch.cat(parts)


@covariance_of_layers.register
def _(covariance: Diagonal, layout: Layout, reads: Sequence[LayerReads], like: Tensor) -> Tensor:
    blocks = tuple(DiagonalBlock(std) for std in covariance.std.split(layout.sizes))
    return covariance_of_layers(Kronecker(blocks), layout, reads, like)


@covariance_of_layers.register
def _(covariance: Kronecker, layout: Layout, reads: Sequence[LayerReads], like: Tensor) -> Tensor:
    num_outputs, num_rows = reads[0].g.shape[:2]
    spread = like.new_zeros(num_rows, num_outputs, num_outputs)
    for name, shape, block in zip(layout.names, layout.shapes, covariance.blocks, strict=True):
        own = [read for read in reads if read.layer.weight == name]
        if own:
            x, g = own[0].x, own[0].g
            if len(own) > 1:
                x, g = torch.cat([read.x for read in own], 1), torch.cat([read.g for read in own], 2)
            spread = spread + _of_matrix(block, shape, x.to(like), g.to(like), transposed=own[0].layer.transposed)
        elif others := [read for read in reads if name in read.layer.names.values()]:
            spread = spread + _of_tensor(block, name, others, like)
    return spread


def _of_matrix(
    block: KroneckerBlock | DiagonalBlock, shape: tuple[int, ...], x: Tensor, g: Tensor, *, transposed: bool
) -> Tensor:
    """Return J V J' of a weight matrix that is read by linear layers."""
    variances, left, right = block.eigenvalues.view(shape), block.left, block.right
    if transposed:
        variances, left, right = variances.mT, right, left
    positions = x.shape[1]
    by_pairs = positions <= MAX_PAIRED and positions < x.shape[2]
    # a narrow matrix, as a factor of LoRA, has fewer elements of J to rotate than a and g have
    if left is not None and (by_pairs or positions <= x.shape[2]):
        g, left = (g.permute(1, 2, 0, 3) @ left).permute(2, 0, 1, 3), None  # in the order of the memory
    if right is not None and (by_pairs or positions <= len(g) * g.shape[3]):
        x, right = x @ right, None
    return paired(x, g, variances) if by_pairs else by_jacobian(x, g, variances, left=left, right=right)


def paired(x: Tensor, g: Tensor, variances: Tensor) -> Tensor:
    """Return [B, C, C] sum_ts sum_i g_cti g_dsi M_its, M_its = sum_j v_ij a_tj a_sj.

    Args:
        x: [B, P, n] a.
        g: [C, B, P, m].
        variances: [m, n] v.
    """
    positions = x.shape[1]
    step = max(1, _block_elements(x) // (positions**2 * max(variances.shape)))
    spread = x.new_empty(x.shape[0], len(g), len(g))
    for rows in _slices(len(x), step):
        a, own = x[rows], g[:, rows]
        pairs = (a[:, :, None] * a[:, None]) @ variances.mT  # [b, P, P, m]
        for output, one in enumerate(own):
            weighted = (one[:, :, None] * pairs).sum(1)
            spread[rows, output] = (own * weighted).sum((-2, -1)).mT
    return spread


def by_jacobian(
    x: Tensor, g: Tensor, variances: Tensor, *, left: Tensor | None = None, right: Tensor | None = None
) -> Tensor:
    """Return [B, C, C] sum_ij v_ij J_cij J_dij with J_c = L' (sum_t g_ct a_t') R, a few elements of J at a time.

    Args:
        x, g, variances: as of ``paired``.
        left, right: L [m, m] and R [n, n], if ``g`` and ``x`` are not rotated yet; None is the identity.
    """
    num_outputs, num_rows, _, height = g.shape
    width, stds = x.shape[2], variances.sqrt()
    elements = _block_elements(x)
    lines = height if left is not None else min(height, max(1, elements // (num_outputs * width)))
    step = max(1, elements // (num_outputs * width * lines))
    by_row = g.permute(1, 0, 3, 2)  # [B, C, m, P]
    spread = x.new_zeros(num_rows, num_outputs, num_outputs)
    for rows in _slices(num_rows, step):
        for part in _slices(height, lines):
            jacobian = (by_row[rows, :, part].flatten(1, 2) @ x[rows]).unflatten(1, (num_outputs, -1))
            jacobian = jacobian if right is None else jacobian @ right
            jacobian = jacobian if left is None else (jacobian.mT @ left).mT.contiguous()
            jacobian = jacobian.mul_(stds[part]).flatten(2)
            spread[rows].baddbmm_(jacobian, jacobian.mT)
    return spread


def _of_tensor(block: KroneckerBlock | DiagonalBlock, name: str, reads: Sequence[LayerReads], like: Tensor) -> Tensor:
    """Return J V J' of a bias, a norm, an embedding or a tied matrix, from its Jacobian."""
    num_outputs, num_rows = reads[0].g.shape[:2]
    step = max(1, JACOBIAN_BUDGET // (block.dim * num_outputs))
    parts = []
    for rows in _slices(num_rows, step):
        jacobian = torch.stack([_row_gradients(read, rows, like, only=name)[name] for read in reads]).sum(0).flatten(2)
        parts.append(jacobian @ block.product(jacobian).mT)
    return torch.cat(parts)


def _row_gradients(read: LayerReads, rows: slice, like: Tensor, only: str | None = None) -> dict[str, Tensor]:
    """Return {name: [b, C, *shape]}, of one tensor if ``only`` is given."""
    found = [
        read.layer.row_gradients(read.x[rows], g[rows], like.dtype, only=only, num_texts=read.num_texts) for g in read.g
    ]
    return {name: torch.stack([one[name] for one in found], 1) for name in found[0]}


def _block_elements(like: Tensor) -> int:
    return BLOCK_ELEMENTS.get(like.device.type, JACOBIAN_BUDGET)


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, total, step)]
