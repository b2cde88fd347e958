"""The rules for columns of a root, against Jacobians and against torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor, NoRule, mean_of
from hf_bayes.models.single_pass.second_order import with_drift
from hf_bayes.models.single_pass.tangents import Tangents
from tests.models.single_pass.cases import normal

MEAN, OTHER = normal(2, 3, 4), normal(2, 3, 4, seed=3)
NARROW = 1e-6
"""The size of columns: rules of wide columns read mean and drift, which here is of the relative size 1e-12."""
COLUMNS = NARROW * normal(5, 2, 3, 4, seed=1)
WEIGHT = normal(6, 4, seed=2)
KEYS = normal(1, 1, 5, 4, seed=4)

RULES: dict[str, Callable[[Any], Any]] = {
    "arranged": lambda x: x.view(2, 3, 2, 2).transpose(1, 2).reshape(2, 2, -1).unsqueeze(0)[0].contiguous().mT,
    "split": lambda x: torch.cat([part * 2 for part in x.split(2, -1)], -1),
    "empty cache": lambda x: torch.cat([torch.zeros(0, dtype=MEAN.dtype), x, OTHER], 1),
    "chosen": lambda x: x[torch.arange(2), torch.tensor([0, 2])],
    "rows": lambda x: x.index_select(0, torch.tensor([1, 0, 1])).repeat_interleave(2, dim=0),
    "masked": lambda x: torch.where(OTHER > 0, x, OTHER).masked_fill(OTHER > 1, 0.0),
    "sums": lambda x: (2 - (x + OTHER[:, :1])) - x / 3 + x[0],
    "products": lambda x: x * torch.tanh(x) * OTHER,
    "linear": lambda x: nn.functional.linear(nn.functional.linear(x, WEIGHT), WEIGHT.mT, WEIGHT[0])[:, 1] / 2,
    "matmul": lambda x: torch.matmul(x, x.mT),
    "softmax": lambda x: x.softmax(-1),
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "mean": lambda x: x.mean(1),
    "no rule of its own": lambda x: torch.logsumexp(x.cumsum(1), -1),
}


def gaussian() -> Any:
    return GaussianTensor.of(MEAN.clone(), Tangents(with_drift(COLUMNS)))


@pytest.mark.parametrize("name", RULES)
def test_columns_are_tangents(name: str) -> None:
    found = RULES[name](gaussian())
    for column, expected in zip(found.spread.roots, COLUMNS, strict=True):
        value, tangent = torch.func.jvp(RULES[name], (MEAN,), (expected,))
        assert torch.equal(mean_of(found), value)
        assert (column - tangent).abs().max() < 1e-9 * tangent.abs().max()  # the drift: 1e-12
    variance = found.spread.roots.square().sum(0)
    assert (found.spread.variance - variance).abs().max() < 1e-12 * variance.max()


def test_columns_behind_norms_of_narrow_inputs_are_tangents() -> None:
    def norms(x: Any) -> Any:
        return nn.functional.rms_norm(nn.functional.layer_norm(x, (4,), WEIGHT[0]), (4,), WEIGHT[1])

    found = norms(gaussian())
    for column, direction in zip(found.spread.roots, COLUMNS, strict=True):
        value, tangent = torch.func.jvp(norms, (MEAN,), (direction,))
        assert torch.equal(mean_of(found), value)
        assert (column - tangent).abs().max() < 1e-9 * tangent.abs().max()  # 1e-12: the variance of the input


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_linearised_in_all_three(deterministic: bool) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    shapes = (1, 4, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3)
    means = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    columns = [NARROW * normal(2, *shape, seed=seed + 9) for seed, shape in enumerate(shapes)]
    spreads = [Tangents(with_drift(column), None, deterministic) for column in columns]
    inputs = [GaussianTensor.of(mean.clone(), spread) for mean, spread in zip(means, spreads, strict=True)]
    found = attend(*inputs).spread.roots

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.repeat_interleave(2, 1).mT / 3**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)

    for index in range(2):
        moved = [c[index] * (0 if deterministic and place < 2 else 1) for place, c in enumerate(columns)]
        expected = torch.func.jvp(plainly, tuple(means), tuple(moved))[1]
        assert (found[index] - expected).abs().max() < 1e-9 * expected.abs().max()  # the drift: 1e-12


def test_a_branch_and_its_skip_connection_are_correlated() -> None:
    x = gaussian()
    total = x + nn.functional.linear(x, -torch.eye(4, dtype=MEAN.dtype))
    assert total.spread.variance.abs().max() < 1e-20 * NARROW**2


def test_products_with_the_covariance_do_not_form_it() -> None:
    for logits in (gaussian(), nn.functional.linear(gaussian(), WEIGHT)[:, 1].float()):
        vectors = normal(*logits.shape, seed=7)
        expected = (logits.spread.covariance() @ vectors[..., None])[..., 0]
        assert (logits.spread.times(vectors) - expected).abs().max() < 1e-10 * expected.abs().max()


def test_dropout_in_training_mode_is_refused() -> None:
    with pytest.raises(NoRule, match="dropout in training mode"):
        nn.functional.dropout(gaussian(), 0.1, True)
