"""The correlation of noise between tokens: tokens share weights, so their noise is not independent.

The covariance between unit k of tokens t and s is taken as (z_t . z_s) sd_tk sd_sk, with features z [B, T, q] of unit
length that all units share. For the noise of W with one variance per input this is exact: z_t . z_s is the cosine of
the two inputs, in units of the standard deviations of W. Features of more than ``NUM_FEATURES`` inputs are projected at
random. The projection is fixed, so a token has the same features with and without a cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUM_FEATURES = 16
"""The length q of features. The cosine of two tokens has an error of at most about 1 / sqrt(q)."""


def compressed(features: Tensor) -> Tensor:
    """Return unit features [..., q] whose cosines approximate the cosines of ``features`` [..., n]."""
    size = features.shape[-1]
    if size <= NUM_FEATURES:
        found = torch.nn.functional.pad(features, (0, NUM_FEATURES - size))
    else:
        found = features @ _projection(size).to(features)
    return unit(found)


def unit(features: Tensor) -> Tensor:
    """Return features of length 1; zeros become the first unit vector."""
    length = features.norm(dim=-1, keepdim=True)
    first = torch.zeros_like(features)
    first[..., 0] = 1
    return torch.where(length > 0, features / length.clamp_min(torch.finfo(features.dtype).tiny), first)


def blended(parts: list[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """Return the features of a sum of independent noises.

    Args:
        parts: the variance [B, T, D] and the features [B, T, q] of each noise; without features there is no result.
    """
    found = None
    for index, (variance, features) in enumerate(parts):
        if features is None:
            return None
        # other directions for other noises: their features must be orthogonal, since they are independent
        turned = features if index == 0 else features @ _rotation(index).to(features)
        weighted = turned * variance.mean(-1, keepdim=True).sqrt()
        found = weighted if found is None else found + weighted
    return None if found is None else unit(found)


def position_dim(features: Tensor, shape: Sequence[int]) -> int | None:
    """Return the dimension of positions in a tensor that has the features [B, T, q].

    Args:
        shape: the shape of the tensor, with a known dimension of positions for [B, T, D], [B, H, T, d] and
            [B, T, H, d]. None is returned for other arrangements.
    """
    rows, positions = features.shape[:2]
    dims = {3: (1,), 4: (2, 1)}.get(len(shape), ()) if shape[0] == rows else ()
    return next((dim for dim in dims if shape[dim] == positions), None)


def chosen(features: Tensor, shape: Sequence[int], index: list[Any], found: Sequence[int]) -> Tensor | None:
    """Return the features of the rows and the positions that are taken from a tensor; None if one of the two is lost.

    Args:
        shape: the shape of the tensor that has the features.
        index: the index of each of its dimensions (``operations.index_of_each``).
        found: the shape of the result.
    """
    if len(found) < 3:
        return None
    if (dim := position_dim(features, shape)) is not None:
        if isinstance(index[0], int) or isinstance(index[dim], int):
            return None
        features = features[index[0]][:, index[dim]]
    fits = found[0] == features.shape[0] and features.shape[1] in found[1:-1]
    return features if fits else None


@functools.cache
def _projection(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(0, 2, (size, NUM_FEATURES), generator=generator, dtype=torch.float64)
    return (2 * signs - 1) / math.sqrt(NUM_FEATURES)


@functools.cache
def _rotation(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.linalg.qr(torch.randn(NUM_FEATURES, NUM_FEATURES, generator=generator, dtype=torch.float64))[0]  # type: ignore[no-any-return]
