"""The factors of LoRA in coordinates in which the columns of B are orthogonal.

    B = U diag(s) V',    B' = U diag(s),    A' = V' A,    B' A' = B A

The product does not change, and so the model does not. Noise with the standard deviation sigma / s_i in row i of A' is
noise U E in the product, and the elements of E are independent, N(0, sigma^2). It does not depend on how the scale of
the product is divided between the factors: (A / c, c B) is the same adapter, and gets the same noise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_FACTOR = re.compile(r"\.lora_(embedding_)?A(?=\.|$)")


class Coordinates(NamedTuple):
    """Members in these coordinates, and the noise of A' at sigma = 1.

    Attributes:
        theta: [M, d] the members with A' and B'.
        unit: [M, d] the standard deviations 1 / s_i; 0 in all other elements, and in rows of A' whose column of B' is 0
            (B has a lower rank): their noise would change nothing.
        layer: [d] the number of the layer whose A' an element belongs to; -1 in all other elements.
        layers: the names of the layers.
        scale: the sigma at which the noise of the product is as large as the product, in the Frobenius norm over all
            layers and members.
    """

    theta: Tensor
    unit: Tensor
    layer: Tensor
    layers: tuple[str, ...]
    scale: float


def factor_pairs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each layer, by the name of the layer."""
    pairs = {}
    for name in shapes:
        found = _FACTOR.search(name)
        if found is None or name.endswith(".bias"):
            continue
        partner = f"{name[: found.start()]}.lora_{found[1] or ''}B{name[found.end() :]}"
        if partner in shapes:
            pairs[name[: found.start()]] = (name, partner)
    return pairs


def canonical(theta: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Coordinates:
    """Return members [M, d] with their factors in these coordinates.

    Args:
        shapes: name -> shape of each random tensor, in the order of theta.
    Raises:
        ValueError: if there is no pair of factors, or every B is zero.
    """
    pairs = factor_pairs(shapes)
    if not pairs:
        raise ValueError(
            f"no pair of LoRA factors A and B is among the random parameters ({', '.join(list(shapes)[:3])}, ...): "
            "give a model with a LoRA adapter, and a subspace with both factors"
        )
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    theta, unit = theta.clone(), torch.zeros_like(theta)
    layer = torch.full((theta.shape[1],), -1)
    columns, units, numbers = (
        dict(zip(shapes, tensor.split(sizes, -1), strict=True)) for tensor in (theta, unit, layer)
    )
    square, count = 0.0, 0
    for number, (a, b) in enumerate(pairs.values()):
        rank = shapes[a][0]
        first, second = columns[a].unflatten(1, (rank, -1)), columns[b].unflatten(1, (-1, rank))
        u, s, v = torch.linalg.svd(second.double(), full_matrices=False)
        used = s > s[:, :1] * max(second.shape[1:]) * torch.finfo(theta.dtype).eps  # as numpy.linalg.matrix_rank
        rotated = v @ first.double()
        second.copy_(_padded(u * (s * used)[:, None], rank))
        first.copy_(_padded(rotated.mT, rank).mT)
        inverse = torch.where(used, 1 / s, 0.0)
        units[a].unflatten(1, (rank, -1)).copy_(_padded(inverse[:, None], rank).mT.expand_as(first))
        numbers[a].fill_(number)
        square += float((s * used)[:, :, None].mul(rotated).square().sum())
        count += int(used.sum()) * first.shape[2]
    if square == 0:
        raise ValueError(
            "every B of the LoRA is zero: the adapter changes nothing, and no noise in A would. Give a trained adapter"
        )
    return Coordinates(theta, unit, layer, tuple(pairs), (square / count) ** 0.5)


def _padded(columns: Tensor, rank: int) -> Tensor:
    """Return [..., k] with zeros up to ``rank`` columns: a B with fewer rows than columns has k < rank."""
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[-1]))
