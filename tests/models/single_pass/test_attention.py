"""The variance of attention against Monte Carlo over shared weights, and against torch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.models.single_pass import attention
from hf_bayes.models.single_pass.token_correlation import compressed
from tests.models.single_pass.cases import normal

B, H, T, D, IN = 1, 2, 5, 3, 6
Q, K, V = (normal(B, H, T, D, seed=seed) for seed in range(3))
X = normal(B, T, IN, seed=3)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


WEIGHTS = attention.weights_of(Q, K, None, D**-0.5, causal=True)


def noise(seed: int, size: float, count: int = 100_000) -> Tensor:
    """Draws of W x for one variance of all weights of W, shared by tokens."""
    weights = size * normal(count, H, D, IN, seed=seed)
    return torch.einsum("nhdi,bti->nbhtd", weights, X)


def test_weights_are_torchs_own() -> None:
    assert (WEIGHTS @ V - attend(Q, K, V)).abs().max() < 1e-12
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    assert (attention.weights_of(Q, K, mask, D**-0.5, causal=False) - WEIGHTS).abs().max() < 1e-12


def test_a_row_without_keys_has_no_weights_and_no_noise() -> None:
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[0] = False

    def weights(query: Tensor) -> Tensor:
        return attention.weights_of(query, K, mask, D**-0.5, causal=False)

    value, moved = torch.func.jvp(weights, (Q,), (normal(*Q.shape, seed=6),))
    assert value[:, :, 0].abs().max() == 0
    assert moved[:, :, 0].abs().max() == 0
    assert bool(moved.isfinite().all())
    assert torch.equal(value[:, :, 1:], WEIGHTS[:, :, 1:])


def test_values_that_share_weights_are_correlated() -> None:
    draws = torch.einsum("bhts,nbhsd->nbhtd", WEIGHTS, noise(4, 0.1))
    variance = 0.01 * X.square().sum(-1)[:, None, :, None].expand(B, H, T, D)
    found, _ = attention.value_noise(WEIGHTS, variance, compressed(X))
    assert (found / draws.var(0) - 1).abs().max() < 0.025  # 5 standard errors of 1e5 draws
    independent, _ = attention.value_noise(WEIGHTS, variance, None)
    assert (independent / draws.var(0) - 1).abs().max() > 0.2  # the rule of the paper


def test_queries_and_keys_are_linearised() -> None:
    size = 0.003
    variance = size**2 * X.square().sum(-1)[:, None, :, None].expand(B, H, T, D)
    shaken = noise(5, size)
    by_query = attention.query_noise(WEIGHTS, V, K, variance, D**-0.5)
    draws = torch.stack([attend(Q + one, K, V) for one in shaken[:20_000]])
    assert (by_query / draws.var(0) - 1)[:, :, 1:].abs().max() < 0.06  # 5 standard errors of 2e4 draws
    by_key = attention.key_noise(WEIGHTS, Q, V, variance, compressed(X), D**-0.5)
    draws = torch.stack([attend(Q, K + one, V) for one in shaken[:20_000]])
    assert (by_key / draws.var(0) - 1)[:, :, 1:].abs().max() < 0.06
    independent = attention.key_noise(WEIGHTS, Q, V, variance, None, D**-0.5)
    assert (independent / draws.var(0) - 1)[:, :, 1:].abs().max() > 0.06
