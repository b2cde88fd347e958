"""The rules for independent elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor
from hf_bayes.models.single_pass.token_correlation import NUM_FEATURES, unit
from scripts.reproduce.small_models import FAMILIES, attached
from tests.models.single_pass.cases import normal
from tests.tiny_models import batch

SHAPE = (2, 3, 4)
MEAN, VARIANCE = normal(*SHAPE), 0.1 + normal(*SHAPE, seed=1).square()
WEIGHT, OTHER = normal(5, 4, seed=2), normal(*SHAPE, seed=3)

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "arranged": lambda x: x.view(2, 3, 2, 2).transpose(1, 2).reshape(2, 2, -1).unsqueeze(0)[0].contiguous(),
    "split": lambda x: torch.cat([part * 2 for part in x.split(2, -1)], -1),
    "chosen": lambda x: x[torch.arange(2), torch.tensor([0, 2])],
    "rows": lambda x: x.index_select(0, torch.tensor([1, 0, 1])).repeat_interleave(2, dim=0),
    "masked": lambda x: torch.where(OTHER > 0, x, OTHER).masked_fill(OTHER > 1, 0.0),
    "sums": lambda x: 2 - (x + OTHER) / 3,
    "products": lambda x: OTHER * (-x),
    "linear": lambda x: nn.functional.linear(x, WEIGHT, WEIGHT[:, 0]),
    "matmul": lambda x: torch.matmul(x, WEIGHT.mT),
    "mixed tokens": lambda x: torch.matmul(OTHER[:, :, :3].softmax(-1), x),
    "mean": lambda x: x.mean(1),
    "relu": lambda x: nn.functional.relu(x),
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "layer norm": lambda x: nn.functional.layer_norm(x, (4,), WEIGHT[0], None, 1e-5),
    "rms norm": lambda x: nn.functional.rms_norm(x, (4,), WEIGHT[0], 1e-5),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_is_the_jacobian_of_independent_elements(name: str) -> None:
    function = RULES[name]
    found = function(GaussianTensor.of(MEAN.clone(), DiagonalSpread(VARIANCE)))
    jacobian = torch.func.jacrev(function)(MEAN)
    expected = (jacobian.square() * VARIANCE).sum((-3, -2, -1))
    assert torch.equal(torch.Tensor(found), torch.Tensor(function(MEAN)))
    assert found.spread.variance.shape == expected.shape  # type: ignore[attr-defined]
    assert (found.spread.variance - expected).abs().max() < 1e-4 * expected.max()  # type: ignore[attr-defined]  # eps


def test_outputs_keep_the_covariance_between_them() -> None:
    x = GaussianTensor.of(MEAN.clone(), DiagonalSpread(VARIANCE))
    logits = nn.functional.linear(x, WEIGHT)[torch.arange(2), torch.tensor([0, 2])].float()
    expected = (WEIGHT * VARIANCE[torch.arange(2), torch.tensor([0, 2])][:, None]) @ WEIGHT.mT
    assert (logits.spread.source.covariance() - expected).abs().max() < 1e-12  # type: ignore[attr-defined]
    assert torch.tanh(logits).spread.source is None  # type: ignore[attr-defined]


def test_pooled_tokens_are_correlated_by_their_features() -> None:
    features = torch.zeros(2, 3, NUM_FEATURES, dtype=MEAN.dtype)
    features[..., 0] = 1
    x = GaussianTensor.of(MEAN.clone(), DiagonalSpread(VARIANCE, features))
    equal, independent = x.mean(1), GaussianTensor.of(MEAN.clone(), DiagonalSpread(VARIANCE)).mean(1)
    expected = VARIANCE.sqrt().mean(1).square()
    assert (equal.spread.variance - expected).abs().max() < 1e-12  # type: ignore[attr-defined]
    assert bool((independent.spread.variance < expected).all())  # type: ignore[attr-defined]


def test_chosen_rows_and_tokens_keep_their_correlation() -> None:
    features = unit(normal(2, 3, NUM_FEATURES, seed=4))
    x = GaussianTensor.of(MEAN.clone(), DiagonalSpread(VARIANCE, features))
    heads: Any = x.view(2, 3, 2, 2).transpose(1, 2)
    assert torch.equal(heads[:, :, -2:].spread.features, features[:, -2:])
    assert torch.equal(heads[torch.tensor([1, 0]), ...].spread.features, features.flip(0))
    assert torch.equal(heads.index_select(2, torch.tensor([2, 0])).spread.features, features[:, [2, 0]])
    assert torch.equal(heads[..., :1].spread.features, features)


def test_a_cache_with_a_window_keeps_the_correlation() -> None:
    build, subspace = FAMILIES["mistral"]  # a window of 4 tokens
    inputs = batch(length=7, rows=2)
    with attached(build(), subspace, 1e-3) as bayesian, torch.no_grad():
        bayesian.single_pass(structure="diagonal")
        whole = bayesian(**inputs).epistemic[:, 6:].flip(0)
        cache = bayesian(input_ids=inputs["input_ids"][:, :6], use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([1, 0]))
        found = bayesian(input_ids=inputs["input_ids"][:, 6:].flip(0), past_key_values=cache).epistemic
    assert (found / whole - 1).abs().max() < 1e-6  # rounding
