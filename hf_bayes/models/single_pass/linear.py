"""The moments of h = W a + b for one vector a with a full covariance, as pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass.weight_laws import WeightLaw


def linear(mean: Tensor, covariance: Tensor, law: WeightLaw) -> tuple[Tensor, Tensor]:
    """Return the mean [..., out] and the covariance [..., out, out] of h (eqs. 1 and 2).

    Args:
        mean: [..., in] E a.
        covariance: [..., in, in] Cov a.
        law: the law of W and b.
    """
    transported = law.mean @ covariance @ law.mean.mT
    return F.linear(mean, law.mean, law.bias), transported + added(mean, covariance, law)


def added(mean: Tensor, covariance: Tensor, law: WeightLaw) -> Tensor:
    """Return [..., out, out], the part of Cov h that a deterministic W would not have."""
    columns = root_of(covariance)
    inputs = torch.cat([mean[..., None], columns], -1)
    inputs = inputs.reshape(-1, *inputs.shape[-2:])  # [B, in, 1 + in]
    found = law.joint(inputs.permute(2, 0, 1)[:, :, None])
    return found.reshape(*mean.shape[:-1], *found.shape[-2:])


def root_of(covariance: Tensor) -> Tensor:
    """Return [..., n, n] R with R R' = covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()[..., None, :]  # type: ignore[no-any-return]
