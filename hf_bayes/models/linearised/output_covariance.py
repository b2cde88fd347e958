"""J V J', the covariance of a linearised model's outputs, for each structure of the covariance V of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import Covariance, Diagonal, Kronecker, LowRank

JACOBIAN_BUDGET = 1 << 26
"""The largest number of elements in the Jacobians that are held at once; a single row is never split."""


def covariance_of_outputs(covariance: Covariance, layout: Layout, jacobian: Mapping[str, Tensor]) -> Tensor:
    """Return [B, C, C] J V J' for a Jacobian {name: [B, C, *shape]}."""
    flat = layout.flatten(jacobian)
    return flat @ covariance.product(flat).mT


@singledispatch
def head_covariance(covariance: Covariance, layout: Layout, features: Tensor, *, weight: str) -> Tensor:
    """Return [B, C, C] J V J' of outputs W phi (+ b), or its diagonal [B, C] if V is diagonal.

    Args:
        features: [B, n] phi.
        weight: name of W [C, n]; the other tensor of the layout, if there is one, is b [C].
    """
    eye = torch.eye(_num_outputs(layout, weight), dtype=features.dtype, device=features.device)
    jacobian = {name: eye.expand(len(features), -1, -1) for name in layout.names}
    outer = eye[None, :, :, None] * features[:, None, None, :]
    return covariance_of_outputs(covariance, layout, jacobian | {weight: outer})


@head_covariance.register
def _(covariance: Diagonal, layout: Layout, features: Tensor, *, weight: str) -> Tensor:
    spread = features.new_zeros(len(features), _num_outputs(layout, weight))
    for name, std in layout.unflatten(covariance.std).items():
        spread += features.square() @ std.square().mT if name == weight else std.square()
    return spread


@head_covariance.register
def _(covariance: Kronecker, layout: Layout, features: Tensor, *, weight: str) -> Tensor:
    """Use V = (L (x) R) diag(values) (L (x) R)' of W: the result is L diag(values (R' phi)^2) L'.

    For values that are a product this is (phi' A phi) B.
    """
    num_outputs = _num_outputs(layout, weight)
    spread = features.new_zeros(len(features), num_outputs, num_outputs)
    for name, block in zip(layout.names, covariance.blocks, strict=True):
        variances = block.eigenvalues.view(num_outputs, -1).mT
        rotated = features if block.right is None else features @ block.right
        values = rotated.square() @ variances if name == weight else variances
        spread += torch.diag_embed(values) if block.left is None else (block.left * values[:, None]) @ block.left.mT
    return spread


@head_covariance.register
def _(covariance: LowRank, layout: Layout, features: Tensor, *, weight: str) -> Tensor:
    """Use V = S (I + Q diag(c - 1) Q') S: a diagonal covariance, and the r columns J S Q."""
    diagonal = head_covariance(Diagonal(covariance.std), layout, features, weight=weight)
    columns = layout.unflatten((covariance.std[:, None] * covariance.basis).mT)  # {name: [r, *shape]}
    read: Any = sum(
        torch.einsum("bn,rcn->bcr", features, part) if name == weight else part.mT for name, part in columns.items()
    )
    low_rank: Tensor = (read * (covariance.scale - 1)) @ read.mT
    return torch.diag_embed(diagonal) + low_rank


def _num_outputs(layout: Layout, weight: str) -> int:
    return layout.shapes[layout.names.index(weight)][0]
