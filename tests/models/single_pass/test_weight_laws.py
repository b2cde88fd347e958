"""The noise that random weights add, against sums over all pairs of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES, Covariance, LowRank, dense, moved
from hf_bayes.models.single_pass.weight_laws import WeightLaw, parts_of, transposed, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import normal

OUT, IN = 3, 4
LAYOUT = Layout(("weight", "bias"), ((OUT, IN), (OUT,)))


def law_of(kind: str) -> tuple[WeightLaw, Covariance]:
    covariance = random_covariance(kind, LAYOUT)
    parts = parts_of(covariance, LAYOUT)
    return weight_law(normal(OUT, IN, seed=1), normal(OUT, seed=2), parts["weight"], parts["bias"]), covariance


def brute_force(covariance: Covariance, moment: Tensor, mean: Tensor) -> Tensor:
    """[k, l] sum_ij E[x_i x_j] Cov[W_ki, W_lj] + E[x_i] (Cov[W_ki, b_l] + Cov[W_li, b_k]) + Cov[b_k, b_l]."""
    whole = dense(covariance, mean)
    weights = whole[: OUT * IN, : OUT * IN].view(OUT, IN, OUT, IN)
    cross = whole[: OUT * IN, OUT * IN :].view(OUT, IN, OUT)
    linear = torch.einsum("i,kil->kl", mean, cross)
    return torch.einsum("ij,kilj->kl", moment, weights) + linear + linear.mT + whole[OUT * IN :, OUT * IN :]


@pytest.mark.parametrize("kind", COVARIANCES)
def test_only_mixed_covariances_correlate_layers(kind: str) -> None:
    law, covariance = law_of(kind)
    assert law.correlated is (kind in ("low_rank", "full"))
    assert transposed(parts_of(covariance, LAYOUT)["weight"]).correlated is law.correlated
    without = LowRank(torch.ones(LAYOUT.dim), torch.eye(LAYOUT.dim)[:, :2], torch.ones(2))  # no direction is left
    assert not parts_of(without, LAYOUT)["weight"].correlated


@pytest.mark.parametrize("kind", COVARIANCES)
def test_added_noise_is_the_sum_over_pairs_of_weights(kind: str) -> None:
    law, covariance = law_of(kind)
    mean, variance = normal(IN, seed=3), normal(IN, seed=4).square()
    expected = brute_force(covariance, mean[:, None] * mean + torch.diag(variance), mean)
    found = law.covariance(mean[None], variance[None])[0]
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()  # rounding
    assert (law.variance(mean, variance) - expected.diagonal()).abs().max() < 1e-10 * expected.abs().max()
    without = law.variance(mean, None)  # the third term of eq. 2
    assert (without - expected.diagonal()).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize("kind", COVARIANCES)
def test_tokens_share_the_weights(kind: str) -> None:
    law, covariance = law_of(kind)
    inputs = normal(1, 1, 2, IN, seed=3)
    found = law.joint(inputs).view(2, OUT, 2, OUT)
    first, second = inputs[0, 0]
    for t, s in ((0, 0), (0, 1)):
        x, y = (first, second)[t], (first, second)[s]
        whole = dense(covariance, x)
        weights = whole[: OUT * IN, : OUT * IN].view(OUT, IN, OUT, IN)
        cross = whole[: OUT * IN, OUT * IN :].view(OUT, IN, OUT)
        expected = torch.einsum("i,kilj,j->kl", x, weights, y) + whole[OUT * IN :, OUT * IN :]
        expected += torch.einsum("i,kil->kl", x, cross) + torch.einsum("j,ljk->kl", y, cross)
        assert (found[t, :, s] - expected).abs().max() < 1e-10 * expected.abs().max()  # rounding


def test_a_transposed_weight_has_the_same_law() -> None:
    layout = Layout(("weight",), ((IN, OUT),))
    for kind in COVARIANCES:
        covariance = random_covariance(kind, layout)
        law = weight_law(normal(OUT, IN), None, transposed(parts_of(covariance, layout)["weight"]), None)
        x = normal(IN, seed=5)
        weights = dense(covariance, x).view(IN, OUT, IN, OUT)
        expected = torch.einsum("i,ikjl,j->kl", x, weights, x)
        assert (law.covariance(x[None], None)[0] - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("kind", COVARIANCES)
def test_a_law_has_the_dtype_of_its_mean(kind: str) -> None:
    law, covariance = law_of(kind)
    narrow = parts_of(moved(covariance, torch.zeros(0)), LAYOUT)
    found = weight_law(law.mean, law.bias, narrow["weight"], narrow["bias"])
    x = normal(2, IN, seed=5)
    torch.testing.assert_close(found.variance(x, None), law.variance(x, None), rtol=1e-5, atol=1e-5)
    assert found.variance(x, None).dtype == torch.float64


def test_another_structure_is_refused_by_name() -> None:
    class Other:
        kind = "other"

    with pytest.raises(ValueError, match="'other'"):
        parts_of(Other(), LAYOUT)  # type: ignore[arg-type]
