"""The moments of y = W x + c B A x, where A and B are Gaussian and independent of each other and of x.

With l = A x, the noise of A reaches l as C_l, and all of l's second moment meets the noise of B:

    Var y_k = sum_i (W + c E B E A)_ki^2 Var x_i + c^2 [ B_k C_l B_k' + (noise of B at E l, Cov l) ].

This is the exact variance of the product of A, B and an x of independent elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.models.single_pass.weight_laws import WeightLaw


def lora_variance(
    mean: Tensor, variance: Tensor | None, low: WeightLaw, high: WeightLaw, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the variances [..., out] that the noise of A and the noise of B add to y.

    Args:
        mean: [..., in] E x.
        variance: [..., in] of independent elements; None means 0.
        low: the law of A [r, in].
        high: the law of B [out, r].
        scaling: c.
    """
    from_low = low.covariance(mean, variance)  # [..., r, r]
    through = torch.einsum("kr,...rs,ks->...k", high.mean, from_low, high.mean)
    spread = from_low
    if variance is not None:
        spread = from_low + (low.mean * variance[..., None, :]) @ low.mean.mT
    return scaling**2 * through, scaling**2 * high.variance(mean @ low.mean.mT, spread)
