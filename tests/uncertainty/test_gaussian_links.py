"""Compare predictions from Gaussian logits with quadrature, limits and draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.uncertainty import gaussian_links as predictive
from hf_bayes.uncertainty.decomposition import decompose
from hf_bayes.uncertainty.gaussian_links import (
    LINKS,
    bridge,
    log_density,
    moments,
    monte_carlo,
    predict_by_bridge,
    predict_by_monte_carlo,
    predict_by_probit,
    probit,
)
from tests.last_layers import clusters, documented, embedded, gaussian_logits

VARIANCES = torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0], dtype=torch.float64)


def two_classes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means, covariances (z_1 - z_2 has mean -12 to 12 and ``VARIANCES``), q_1 and EU by quadrature."""
    away = torch.linspace(-12, 12, 97, dtype=torch.float64)[:, None].expand(-1, len(VARIANCES))
    root = VARIANCES.sqrt()[:, None] * torch.tensor(
        [1.3, 0.3]
    )  # perfectly correlated logits; their difference is ``root``
    nodes = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    weights = (-nodes.square() / 2).exp()
    weights /= weights.sum()
    p = torch.sigmoid(away[..., None] + VARIANCES.sqrt()[:, None] * nodes)
    q = (p * weights).sum(-1)
    epistemic = entropy(q) - (entropy(p) * weights).sum(-1)
    mean = torch.stack([away, torch.zeros_like(away)], -1)
    return mean, (root[:, :, None] * root[:, None, :]).expand(97, -1, -1, -1), q, epistemic


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)


def random_gaussians(num_classes: int, scale: float, rows: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    mean = 2 * torch.randn(rows, num_classes, generator=generator, dtype=torch.float64)
    root = torch.randn(rows, num_classes, num_classes, generator=generator, dtype=torch.float64)
    return mean, scale * root @ root.mT / num_classes


# -- two classes: quadrature ------------------------------------------------------------------------------------------

PROBIT_ERROR = 0.018
"""The value sup |Phi(x) - sigmoid(sqrt(8 / pi) x)|: the error for a large variance. Smaller variances have less."""


def test_probit_of_two_classes_is_within_its_known_error() -> None:
    mean, covariance, q, _ = two_classes()
    found = probit(mean, covariance)[..., 0].exp()
    assert (found - q).abs().max() < PROBIT_ERROR
    assert (found - q)[:, 0].abs().max() < 1e-4  # second order in the variance 0.01


def test_the_quadrature_check_catches_wrong_formulas() -> None:
    mean, covariance, q, _ = two_classes()
    no_root = torch.sigmoid(mean[..., 0] / (1 + math.pi / 8 * VARIANCES))
    forgotten = mean.softmax(-1)[..., 0]
    variance_alone = (mean / (1 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)).sqrt()).softmax(-1)[..., 0]
    for wrong in (no_root, forgotten, variance_alone):
        assert (wrong - q).abs().max() > 2 * PROBIT_ERROR


@pytest.mark.statistics
def test_monte_carlo_of_two_classes_is_within_its_standard_error() -> None:
    mean, covariance, q, epistemic = two_classes()
    found = predict_by_monte_carlo(mean[None], covariance[None], num_draws=4000)
    # a probability has a variance of at most 1/4; rows share their draws, so their largest error is that of a few rows
    assert (found.log_probs[..., 0].exp() - q).abs().max() < 4 * 0.5 / 4000**0.5
    assert found.epistemic is not None
    # an entropy lies in [0, log 2], with the standard error of q times the slope of its entropy where that is large
    assert (found.epistemic - epistemic).abs().max() < 0.04
    without = predict_by_monte_carlo(mean[None], 0 * covariance[None], num_draws=4000)
    assert without.epistemic is not None
    assert (without.epistemic - epistemic).abs().max() > 0.3


@pytest.mark.parametrize(("index", "error"), [(0, 1e-4), (1, 5e-4), (2, 0.02), (3, 0.13), (4, 0.10)])
def test_bridge_of_two_classes_is_within_its_known_error(index: int, error: float) -> None:
    mean, covariance, q, epistemic = two_classes()
    found = predict_by_bridge(mean[None], covariance[None])
    assert found.epistemic is not None
    assert (found.log_probs[..., 0].exp() - q).abs().max() < PROBIT_ERROR
    # measured over means from -12 to 12 by variance, of at most 0.57 nats; docs/uncertainty.md has the table
    assert (found.epistemic - epistemic)[:, index].abs().max() < error


# -- any number of classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", LINKS)
def test_a_constant_on_all_logits_changes_nothing(link: str) -> None:
    mean, covariance = random_gaussians(4, 0.5)
    plain = LINKS[link](mean[None], covariance[None])
    shifted = LINKS[link](mean[None] + 3, covariance[None])
    assert torch.allclose(plain.log_probs, shifted.log_probs, atol=1e-12)
    if link != "monte_carlo":  # another ``z`` gives other draws
        noisy = LINKS[link](mean[None], covariance[None] + 7)
        assert torch.allclose(plain.log_probs, noisy.log_probs, atol=1e-12)
        assert all(torch.allclose(a, noisy.uncertainties[n], atol=1e-9) for n, a in plain.uncertainties.items())


@pytest.mark.parametrize("num_classes", [2, 5])
def test_small_covariances_give_half_the_fisher_trace(num_classes: int) -> None:
    mean, covariance = random_gaussians(num_classes, 1e-4)
    p = mean.softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = (fisher @ covariance).diagonal(dim1=-2, dim2=-1).sum(-1) / 2
    closed = predict_by_bridge(mean[None], covariance[None]).epistemic
    drawn = predict_by_monte_carlo(mean[None], covariance[None], num_draws=20000).epistemic
    assert closed is not None
    assert drawn is not None
    assert torch.allclose(closed, expected, rtol=2e-3)  # the next order: a variance of 1e-4 times e^(2 * 2)
    assert torch.allclose(drawn, expected, rtol=5 * (2 / 10000) ** 0.5)  # chi^2 of 10000 pairs
    assert not torch.allclose(2 * closed, expected, rtol=0.1)


def test_bridge_agrees_with_draws_of_its_dirichlet() -> None:
    mean, covariance = random_gaussians(4, 1.0, rows=6)
    torch.manual_seed(0)
    draws = torch.distributions.Dirichlet(bridge(mean, covariance)).sample((20000,))
    expected = decompose(draws.clamp_min(1e-300).log())
    found = predict_by_bridge(mean[None], covariance[None])
    for name, value in found.uncertainties.items():
        # entropies in [0, log 4]: a standard deviation below 0.7
        assert torch.allclose(value, getattr(expected, name), atol=5 * 0.7 / 20000**0.5), name


@pytest.mark.statistics
@pytest.mark.parametrize("num_classes", [3, 10])
def test_links_beat_their_textbook_forms_for_many_classes(num_classes: int) -> None:
    mean, covariance = random_gaussians(num_classes, 1.0, rows=200)
    exact = predict_by_monte_carlo(mean[None], covariance[None], num_draws=10000)
    assert exact.epistemic is not None
    shared = covariance.diagonal(dim1=-2, dim2=-1) + 4  # noise that all logits share does not change probabilities
    textbook = (mean / (1 + math.pi / 8 * shared).sqrt()).softmax(-1)
    q = exact.log_probs.exp()
    assert (probit(mean, covariance).exp() - q).abs().sum(-1).mean() < (textbook - q).abs().sum(-1).mean()
    centre = torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes
    projected = (centre @ covariance @ centre).diagonal(dim1=-2, dim2=-1)
    odds = mean.softmax(-1) * (-mean).exp().sum(-1, keepdim=True) * mean.exp().sum(-1, keepdim=True)
    published = (1 - 2 / num_classes + odds / num_classes**2) / projected
    published = published / published.sum(-1, keepdim=True)
    ours = bridge(mean, covariance)
    ours = ours / ours.sum(-1, keepdim=True)
    assert (ours - q).abs().sum(-1).mean() < 0.5 * (published - q).abs().sum(-1).mean()


def distances(mean: Tensor, covariance: Tensor) -> dict[str, float]:
    """Return the mean total variation between q and Monte Carlo, and the mean error of EU in nats."""
    exact = predict_by_monte_carlo(mean[None], covariance[None], num_draws=20_000)
    assert exact.epistemic is not None
    q = exact.log_probs.exp()
    means = {"probit": probit(mean, covariance), "pairs": predictive._pairwise_probit(mean, covariance)}
    found = {name: float((log_probs.exp() - q).abs().sum(-1).mean()) / 2 for name, log_probs in means.items()}
    by_bridge = predict_by_bridge(mean[None], covariance[None])
    assert by_bridge.epistemic is not None
    found["bridge"] = float((by_bridge.log_probs.exp() - q).abs().sum(-1).mean()) / 2
    found["point"] = float((mean.softmax(-1) - q).abs().sum(-1).mean()) / 2
    return found | {"epistemic": float((by_bridge.epistemic - exact.epistemic).abs().mean() / exact.epistemic.mean())}


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.statistics
def test_links_are_near_monte_carlo_on_a_last_layer(structure: str) -> None:
    features, labels = clusters(num_classes=12, rows=12, size=16)
    found = distances(*gaussian_logits(features, labels, prior_std=1.0)[structure])
    # measured 0.0124 against 0.0321 (full) and 0.0149 against 0.0461 (diagonal); without a covariance 0.05
    assert found["probit"] < 0.5 * found["pairs"]
    assert found["probit"] < 0.4 * found["point"]
    assert found["bridge"] == pytest.approx(found["probit"])
    assert found["epistemic"] < 0.1  # measured 0.06 and 0.05


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize(("prior_std", "share"), [(1.0, 0.5), (3.0, 0.9)])
@pytest.mark.statistics
def test_links_are_near_monte_carlo_on_encoded_texts(
    prior_std: float, share: float, structure: str, encoded: Any
) -> None:
    found = distances(*gaussian_logits(*encoded, prior_std=prior_std)[structure])
    # measured at 1.0: 0.007 against 0.027 (full), 0.011 against 0.035 (diagonal); at 3.0: 0.054 against 0.066, 0.031
    # against 0.098; without a covariance 0.03 and 0.25
    assert found["probit"] < share * found["pairs"]
    assert found["probit"] < 0.4 * found["point"]
    assert found["bridge"] == pytest.approx(found["probit"])
    assert found["epistemic"] < 0.15  # measured 0.03 to 0.10


@pytest.fixture(scope="module")
def encoded() -> tuple[Tensor, Tensor]:
    """Return the 96 main directions of the encoded docstrings of 12 modules."""
    texts, labels = documented()
    features = embedded(texts)
    return features @ torch.linalg.svd(features, full_matrices=False)[2][:96].T, labels


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_probit_of_two_classes_is_mackays(scale: float) -> None:
    mean, covariance = random_gaussians(2, scale)
    away = mean[:, 0] - mean[:, 1]
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    expected = torch.sigmoid(away / (1 + math.pi / 8 * variance).sqrt())
    assert torch.allclose(probit(mean, covariance)[:, 0].exp(), expected, rtol=1e-12)
    pairs = predictive._pairwise_probit(mean, covariance)
    assert torch.allclose(probit(mean, covariance), pairs, rtol=1e-12)


@pytest.mark.parametrize("link", LINKS)
def test_a_diagonal_is_the_dense_matrix_with_that_diagonal(link: str) -> None:
    mean, covariance = random_gaussians(3, 0.5)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    thin, dense = (LINKS[link](mean[None], c[None]) for c in (variance, torch.diag_embed(variance)))
    assert torch.allclose(thin.log_probs, dense.log_probs, atol=1e-12)
    assert all(torch.allclose(a, dense.uncertainties[n], atol=1e-12) for n, a in thin.uncertainties.items())


@pytest.mark.parametrize("link", LINKS)
def test_parts_add_up_and_probit_has_a_total_alone(link: str) -> None:
    mean, covariance = random_gaussians(3, 2.0)
    found = LINKS[link](mean[None].float(), covariance[None].float())
    assert torch.allclose(found.log_probs.logsumexp(-1), torch.zeros(50), atol=1e-6)
    assert torch.allclose(found.total, torch.special.entr(found.log_probs.exp()).sum(-1), atol=1e-5)
    if link == "probit":
        assert list(found.uncertainties) == ["total"]
        return
    assert found.aleatoric is not None
    assert found.epistemic is not None
    assert torch.equal(found.total, found.aleatoric + found.epistemic)
    assert bool((found.epistemic > 0).all() and (found.aleatoric > 0).all())


def test_a_mixture_of_points_is_members() -> None:
    mean, covariance = random_gaussians(3, 0.0, rows=4)
    mean = mean.view(2, 2, 3)
    expected = decompose(mean)
    assert torch.allclose(predict_by_probit(mean, covariance.view(2, 2, 3, 3)).total, expected.total, atol=1e-12)
    for predict in (predict_by_bridge, predict_by_monte_carlo):
        found = predict(mean, covariance.view(2, 2, 3, 3))
        assert found.epistemic is not None
        assert torch.allclose(found.epistemic, expected.epistemic, atol=1e-10)
    one = predict_by_bridge(*(part[None] for part in random_gaussians(3, 0.5)))
    two = predict_by_bridge(*(part.expand(2, *part.shape) for part in random_gaussians(3, 0.5)))
    assert all(torch.allclose(a, two.uncertainties[n], atol=1e-12) for n, a in one.uncertainties.items())


def test_rows_ignore_their_batch_and_draws_have_the_covariance() -> None:
    mean, covariance = random_gaussians(3, 1.0, rows=5)
    draws = monte_carlo(mean, covariance, torch.Generator().manual_seed(1), 20000)
    alone = monte_carlo(mean[2:3], covariance[2:3], torch.Generator().manual_seed(1), 20000)
    assert torch.allclose(draws[:, 2:3], alone, atol=1e-12)
    assert torch.allclose(draws.mean(0), mean, atol=1e-12)  # pairs
    away = draws - mean
    found = torch.einsum("sbi,sbj->bij", away, away) / 20000
    largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    assert bool(((found - covariance).abs() < 5 * largest * (2 / 10000) ** 0.5).all())


def test_singular_covariances_can_be_drawn_from() -> None:
    root = torch.tensor([[1.0, 2.0, -1.0]])
    draws = monte_carlo(torch.zeros(1, 3), (root.mT @ root)[None], torch.Generator().manual_seed(0), 10)
    assert torch.allclose(draws[:, 0], draws[:, 0, :1] * root, atol=1e-3)  # the root of a rounding of 1e-7


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_densities_and_moments_are_those_of_the_mixture() -> None:
    mean, covariance = (part.view(2, 3, *part.shape[1:]) for part in random_gaussians(2, 0.5, rows=6))
    y = torch.randn(3, 2, dtype=torch.float64)
    noisy = covariance + 0.3**2 * torch.eye(2, dtype=torch.float64)
    each = torch.distributions.MultivariateNormal(mean, noisy).log_prob(y)
    assert torch.allclose(log_density(y, mean, covariance, 0.3), each.logsumexp(0) - math.log(2), atol=1e-12)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    thin, dense = (log_density(y, mean, c, 0.3) for c in (variance, torch.diag_embed(variance)))
    assert torch.allclose(thin, dense, atol=1e-12)
    center, spread = moments(mean, covariance)
    second = (variance + mean.square()).mean(0)
    assert torch.allclose(spread, second - center.square(), atol=1e-12)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "covariance", "message"),
    [
        (torch.zeros(2, 3), torch.ones(2, 2), r"got \[2, 3\] and \[2, 2\]"),
        (torch.zeros(2, 1), torch.ones(2, 1), r"C >= 2"),
        (torch.zeros(2, 3), -torch.ones(2, 3), r"smallest variance -1"),
        (torch.full((2, 3), torch.nan), torch.ones(2, 3), r"6 means .* not finite"),
    ],
)
def test_what_is_no_gaussian_is_refused(mean: Tensor, covariance: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probit(mean, covariance)


def test_an_odd_number_of_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="num_draws must be an even number"):
        monte_carlo(torch.zeros(2), torch.ones(2), torch.Generator(), 3)
