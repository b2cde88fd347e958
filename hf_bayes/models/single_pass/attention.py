"""The variance of attention o_t = sum_s a_ts v_s, whose weights a = softmax(scale q k') may be uncertain, too.

The paper takes query and key at their means (eq. 59). It also treats values of different tokens as independent, though
they share W_v; the variance is then .43 to .88 of the true one. Here the values' correlation between tokens is used
(``token_correlation``). Uncertain queries and keys can be added by linearisation, with c_ts = v_s - o_t:

    d o_t = scale sum_s a_ts c_ts (k_s . d q_t + q_t . d k_s).

Shapes: a [B, H, T, S], v, k and their variances [B, H, S, d], q and its variance [B, H, T, d], features z [B, S, q].
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, *, causal: bool) -> Tensor:
    """Return [B, H, T, S] softmax(scale q k' + mask), as torch's scaled dot product attention defines it."""
    scores = query @ key.mT * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    # a row without any allowed key (padding) gives NaN in softmax, and 0 in torch's attention. nan_to_num would set the
    # value alone to 0, and leave a derivative of NaN
    return weights.masked_fill(weights.isnan(), 0.0)


def value_noise(weights: Tensor, variance: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the variance [B, H, T, d] from uncertain values, and the features [B, T, q] of the outputs' noise.

    Without features, values of different tokens are independent.
    """
    if features is None:
        return weights.square() @ variance, None
    columns = variance.sqrt()[..., None] * features[:, None, :, None, :]
    mixed = (weights @ columns.flatten(-2)).unflatten(-1, (variance.shape[-1], -1))
    return mixed.square().sum(-1), mixed.mean((1, 3))


def query_noise(weights: Tensor, value: Tensor, key: Tensor, variance: Tensor, scale: float) -> Tensor:
    """Return the variance [B, H, T, d] from uncertain queries: scale^2 sum_e Var q_te (sum_s a_ts c_ts k_se)^2."""
    heads = []
    for head in range(weights.shape[1]):  # one head at a time, since all pairs of units [B, S, d, d] are held
        a, v, k = weights[:, head], value[:, head], key[:, head]
        pairs = (v[..., :, None] * k[..., None, :]).flatten(-2)
        crossed = (a @ pairs).unflatten(-1, (v.shape[-1], -1)) - (a @ v)[..., :, None] * (a @ k)[..., None, :]
        heads.append(torch.einsum("btde,bte->btd", crossed.square(), variance[:, head]))
    return scale**2 * torch.stack(heads, 1)


def key_noise(
    weights: Tensor, query: Tensor, value: Tensor, variance: Tensor, features: Tensor | None, scale: float
) -> Tensor:
    """Return the variance [B, H, T, d] from uncertain keys, whose noise is correlated as ``features``."""
    spread = weights * (query.square() @ variance.mT).sqrt()
    output = weights @ value
    if features is None:
        each = spread.square()
        total = each @ value.square() - 2 * output * (each @ value) + output.square() * each.sum(-1, keepdim=True)
        return scale**2 * total.clamp_min(0)
    columns = (value[..., None] * features[:, None, :, None, :]).flatten(-2)
    mixed = (spread @ columns).unflatten(-1, (value.shape[-1], -1))
    shift = (spread @ features[:, None])[..., None, :] * output[..., None]
    return scale**2 * (mixed - shift).square().sum(-1)  # type: ignore[no-any-return]
