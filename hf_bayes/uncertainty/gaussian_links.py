"""Predictions from Gaussian outputs z ~ N(mean, covariance): class probabilities with uncertainty, or a density.

A linearised model has Gaussian outputs. A mixture of K Gaussians over its parameters gives K Gaussian outputs of equal
weight. With p = softmax(z) and q = E p, the definitions equal ``decomposition`` with infinitely many members:

    total = H[q],   aleatoric = E H[p],   epistemic = total - aleatoric = E KL(p || q) = I(y; z) in [0, log C].

E softmax(z) has no closed form. Three approximations are available:

* ``probit`` (MacKay 1992, The evidence framework applied to classification networks) gives q, and so the total
  uncertainty. For more than two classes, each class is compared with the mean of the other classes. E H[p] is not a
  function of q, so aleatoric and epistemic uncertainty are not defined.
* ``bridge`` (the Laplace bridge: MacKay 1998, Choice of basis for Laplace approximation; Hobbhahn, Kristiadi and
  Hennig 2022) is a Dirichlet distribution of p around the same q. Its E H[p] is known in closed form.
* ``monte_carlo`` uses draws of z as members.

Softmax ignores a constant added to all of z, and so do the three approximations. docs/uncertainty.md has their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.decomposition import decompose, mixture, predict

NUM_DRAWS = 1000
"""Draws of ``monte_carlo``: the standard error of q is below 0.5 / sqrt(1000) = 0.016."""

_SMALLEST_VARIANCE = 1e-30
"""A lower bound on variances: at 0 the Dirichlet distribution would be infinitely concentrated."""


class GaussianPrediction(NamedTuple):
    """The prediction of a classifier with Gaussian logits.

    Attributes:
        log_probs: [..., C] log q.
        total: [...] nats.
        aleatoric, epistemic: [...] nats; their sum is the total. None if the approximation does not define them.
    """

    log_probs: Tensor
    total: Tensor
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None

    @property
    def uncertainties(self) -> dict[str, Tensor]:
        """The defined uncertainties, by name."""
        named = {"total": self.total, "aleatoric": self.aleatoric, "epistemic": self.epistemic}
        return {name: value for name, value in named.items() if value is not None}


@torch.no_grad()
def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return [..., C] log q with q = softmax(m'_k / sqrt(1 + pi/8 w_k)) and w_k = (C / (C - 1))^2 Var[z'_k].

    z'_k = z_k - mean_l z_l are the centred logits, and m' are their means. For two classes with log odds
    a ~ N(mu, s^2), MacKay (1992) shrinks a to mu / sqrt(1 + pi/8 s^2). For C classes, the log odds of class k against
    the geometric mean of the other classes are a_k = z_k - mean_{l != k} z_l = C / (C - 1) z'_k, with variance w_k.
    Shrinking a_k by a factor shrinks z'_k by the same factor, and softmax turns the result into a distribution.

    For two classes w_k is Var[z_1 - z_2], and q_1 is MacKay's sigmoid. Noise that all logits share cancels in w_k; it
    does not cancel in Var[z_k]. Lu, Ie and Sha (2020, Mean-field approximation to the Gaussian-softmax integral) shrink
    the log odds of every pair of classes. Their result is 1.1 to 4 times further from Monte Carlo on posteriors of a
    last layer (docs/uncertainty.md).

    Args:
        mean: [..., C >= 2].
        covariance: [..., C, C], or its diagonal [..., C] if the logits are independent.
    Raises:
        ValueError: for other shapes, numbers that are not finite, or a negative variance.
    """
    variance, size = _variances(mean, covariance), mean.shape[-1]
    rows = variance / size if covariance.ndim == mean.ndim else covariance.mean(-1)
    centred = (variance - 2 * rows + rows.mean(-1, keepdim=True)).clamp_min(0)
    scale = (1 + math.pi / 8 * (size / (size - 1)) ** 2 * centred).rsqrt()
    return ((mean - mean.mean(-1, keepdim=True)) * scale).log_softmax(-1)


def _pairwise_probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return [..., C] log q by the log odds of every pair: 1 / q_k ~ sum_l exp(-(m_k - m_l) / sqrt(1 + pi/8 v_kl)).

    v_kl is the variance of z_k - z_l (Lu, Ie and Sha 2020).
    """
    variance = _variances(mean, covariance)
    pair_variance = variance[..., :, None] + variance[..., None, :]
    if covariance.ndim > mean.ndim:
        pair_variance = pair_variance - 2 * covariance
    scale = (1 + math.pi / 8 * pair_variance.clamp_min(0)).rsqrt()
    odds = (mean[..., None, :] - mean[..., :, None]) * scale
    return (-odds.logsumexp(-1)).log_softmax(-1)


@torch.no_grad()
def bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return the concentrations alpha = A q, [..., C] float64, of a Dirichlet distribution of p; q is from ``probit``.

    In the softmax basis the log density of a Dirichlet distribution has the Hessian -A F with F = diag(r) - r r' at its
    mean r (MacKay 1998). With S the covariance, A minimises KL(N(., S) || N(., F^+ / A)):

        A = (C - 1) / tr(F S).

    r is the mean by pairs of classes, which for two classes is q. For more classes, r = q gives epistemic uncertainties
    that are on average a tenth further from Monte Carlo on posteriors of a last layer (docs/uncertainty.md). For two
    classes A is the A of Hobbhahn et al. with p for q. Hobbhahn et al. compute each alpha_k from S_kk alone. If
    variances differ between classes, the mean of their Dirichlet distribution departs from the mean of the logits.

    Arguments and errors are as in ``probit``.
    """
    mean, covariance = mean.double(), covariance.double()
    variance, pairs = _variances(mean, covariance), _pairwise_probit(mean, covariance).exp()
    if covariance.ndim > mean.ndim:
        shared = (pairs[..., None, :] @ covariance @ pairs[..., :, None])[..., 0, 0]
    else:
        shared = (pairs.square() * variance).sum(-1)
    trace = (pairs * variance).sum(-1) - shared  # tr(F S)
    return probit(mean, covariance).exp() * ((mean.shape[-1] - 1) / trace.clamp_min(_SMALLEST_VARIANCE))[..., None]


@torch.no_grad()
def monte_carlo(mean: Tensor, covariance: Tensor, generator: torch.Generator, num_draws: int = NUM_DRAWS) -> Tensor:
    """Return [S, ..., C] draws of z in antithetic pairs.

    All rows share the same noise, so the draws of a row do not depend on the other rows of its batch.

    Args:
        mean, covariance: as in ``probit``, with at least one class; the covariance may be singular.
        generator: a generator on the CPU.
        num_draws: S, even.
    """
    if num_draws < 2 or num_draws % 2:
        raise ValueError(f"num_draws must be an even number >= 2 (they come in pairs), got {num_draws}")
    variance = _variances(mean, covariance, least=1)
    half = torch.randn(num_draws // 2, mean.shape[-1], generator=generator, dtype=torch.float64).to(mean)
    noise = torch.cat([half, -half])
    if covariance.ndim == mean.ndim:
        noise = noise.view(num_draws, *[1] * (mean.ndim - 1), -1)
        return mean + variance.clamp_min(0).sqrt() * noise
    values, vectors = torch.linalg.eigh(covariance)
    # the symmetric root is a continuous function of the covariance; eigenvectors are not, because their signs are free
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return mean + torch.einsum("...cd,sd->s...c", root, noise)


def predict_by_probit(mean: Tensor, covariance: Tensor) -> GaussianPrediction:
    """Predict from K components by ``probit``. Aleatoric and epistemic uncertainty are not defined.

    Args:
        mean: [K, ..., C].
        covariance: [K, ..., C, C], or its diagonal [K, ..., C].
    """
    log_probs = probit(mean, covariance)
    return GaussianPrediction(mixture(log_probs), decompose(log_probs).total)


def predict_by_bridge(mean: Tensor, covariance: Tensor) -> GaussianPrediction:
    """Predict from K components in closed form; the arguments are as in ``predict_by_probit``.

    The epistemic uncertainty of a mixture has two parts: I(y; z, k) = I(y; k) + I(y; z | k). The first is between the
    q_k of the components and comes from ``decompose``. The second is the mean of the epistemic uncertainties within
    components. Within one component, with a = alpha, A = sum a and psi the digamma function,

        I(y; z) = sum_c (a_c / A) [psi(a_c + 1) - log a_c] - [psi(A + 1) - log A].
    """
    alpha = bridge(mean, covariance)
    concentration = alpha.sum(-1)
    probs = alpha / concentration[..., None]
    mean_gap = (probs * torch.digamma(alpha + 1) - torch.xlogy(probs, alpha)).sum(-1)
    within = (mean_gap - torch.digamma(concentration + 1) + concentration.log()).clamp_min(0).mean(0)
    log_probs, between = predict(probit(mean.double(), covariance.double()))
    epistemic = between.epistemic + within
    aleatoric = (between.total - epistemic).clamp_min(0)
    log_probs, aleatoric, epistemic = (part.to(mean.dtype) for part in (log_probs, aleatoric, epistemic))
    return GaussianPrediction(log_probs, aleatoric + epistemic, aleatoric, epistemic)


def predict_by_monte_carlo(
    mean: Tensor, covariance: Tensor, *, num_draws: int = NUM_DRAWS, seed: int = 0
) -> GaussianPrediction:
    """Predict from K components with ``num_draws`` draws of each as members; see ``predict_by_probit``."""
    draws = monte_carlo(mean, covariance, torch.Generator().manual_seed(seed), num_draws)
    log_probs, uncertainty = predict(draws.flatten(0, 1))
    return GaussianPrediction(log_probs, *uncertainty)


LINKS: dict[str, Callable[[Tensor, Tensor], GaussianPrediction]] = {
    "monte_carlo": predict_by_monte_carlo,
    "probit": predict_by_probit,
    "bridge": predict_by_bridge,
}
"""The functions that turn Gaussian logits into probabilities, by name."""

SINGLE_PASS = "single_pass"
"""The prediction mode that computes moments of hidden states in one forward pass."""

PREDICTIONS: dict[str, str | None] = {
    "members": None,
    "linearised": "monte_carlo",
    "linearised_probit": "probit",
    "linearised_bridge": "bridge",
    SINGLE_PASS: "bridge",
}
"""Name of a prediction mode in a posterior's file -> the link of its Gaussian outputs (None: predict by members)."""


def name_of_link(link: str | None) -> str:
    """Return the name of the prediction mode by members, or by linearised members, whose link this is."""
    return next(name for name, known in PREDICTIONS.items() if known == link)


@torch.no_grad()
def moments(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the [..., C] mean and variance of an equally weighted mixture of K Gaussians (law of total variance).

    Args:
        mean: [K, ..., C].
        covariance: [K, ..., C, C], or its diagonal.
    """
    variance = _variances(mean, covariance, least=1)
    return mean.mean(0), variance.mean(0) + mean.var(0, correction=0)


@torch.no_grad()
def log_density(values: Tensor, mean: Tensor, covariance: Tensor, noise_std: float) -> Tensor:
    """Return [...] log p(y) of values y = z + N(0, noise_std^2): the predictive log-density of a regression, in nats.

    Args:
        values: [..., C] y.
        mean: [K, ..., C] of K components.
        covariance: [K, ..., C, C], or its diagonal.
    """
    variance = _variances(mean, covariance, least=1)
    residual, size = values - mean, mean.shape[-1]
    if covariance.ndim == mean.ndim:
        variance = variance + noise_std**2
        square, log_det = (residual.square() / variance).sum(-1), variance.log().sum(-1)
    else:
        noise = noise_std**2 * torch.eye(size, dtype=mean.dtype, device=mean.device)
        factor = torch.linalg.cholesky(covariance + noise)
        white = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)
        square, log_det = white.square().sum((-2, -1)), 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    each = -0.5 * (square + log_det + size * math.log(2 * math.pi))
    return each.logsumexp(0) - math.log(len(mean))


def _variances(mean: Tensor, covariance: Tensor, *, least: int = 2) -> Tensor:
    """Return the [..., C] variances, after checking mean and covariance."""
    shape = tuple(mean.shape)
    if not shape or shape[-1] < least or tuple(covariance.shape) not in (shape, (*shape, shape[-1])):
        raise ValueError(
            f"Gaussian outputs need a mean [..., C >= {least}] and a covariance [..., C, C] or its diagonal [..., C], "
            f"got {list(shape)} and {list(covariance.shape)}"
        )
    variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=-2, dim2=-1)
    if not (bool(mean.isfinite().all()) and bool(covariance.isfinite().all()) and bool((variance >= 0).all())):
        raise ValueError(
            f"Gaussian outputs need finite numbers and variances >= 0, got {int((~mean.isfinite()).sum())} means and "
            f"{int((~covariance.isfinite()).sum())} covariances that are not finite, smallest variance "
            f"{float(variance.min()):.3g}: the model or its posterior has diverged"
        )
    return variance
