"""What Gaussian outputs z ~ N(mean, covariance) predict: q = E softmax(z) and its uncertainty in nats, or a number.

A linearised model has such outputs (``linearised``); a mixture of K Gaussians over its parameters gives K of them, of
equal weight. With p = softmax(z), the definitions are those of ``uncertainty`` with infinitely many members:

    total = H[q],   aleatoric = E H[p],   epistemic = total - aleatoric = E KL(p || q) = I(y; z) in [0, log C].

E softmax(z) has no closed form. There are three ways around it, and ``decompose`` sees what each makes of a component:

* ``probit`` (MacKay 1992, The evidence framework applied to classification networks; of more than two classes with
  each class against the mean of the others): q alone, and so its total. E H[p] is not a function of q.
* ``bridge`` (the Laplace bridge: MacKay 1998, Choice of basis for Laplace approximation; Hobbhahn, Kristiadi and
  Hennig 2022): a Dirichlet distribution of p around the same q, whose E H[p] is known in closed form.
* ``monte_carlo``: draws of z are members.

Softmax ignores a constant added to all of z, and so do all three. docs/uncertainty.md has their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.decomposition import decompose, mixture, predict

NUM_DRAWS = 1000
"""Draws of ``monte_carlo``: q is off by less than 0.5 / sqrt(1000) = 0.016 (one standard error)."""

_SMALLEST_VARIANCE = 1e-30
"""In place of 0, where a Dirichlet would be infinitely concentrated."""


class GaussianPrediction(NamedTuple):
    """A classification from Gaussian logits.

    Attributes:
        log_probs: [..., C] log q.
        total: [...] nats.
        aleatoric, epistemic: [...] nats, adding up to the total; None where the approximation does not define them.
    """

    log_probs: Tensor
    total: Tensor
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None

    @property
    def uncertainties(self) -> dict[str, Tensor]:
        """Those that are defined, by name."""
        named = {"total": self.total, "aleatoric": self.aleatoric, "epistemic": self.epistemic}
        return {name: value for name, value in named.items() if value is not None}


@torch.no_grad()
def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return [..., C] log q of q = softmax(m'_k / sqrt(1 + pi/8 w_k)), w_k = (C / (C - 1))^2 Var[z'_k].

    z'_k = z_k - mean_l z_l are the centred logits, m' their means. MacKay (1992) shrinks the log odds a of two
    classes, a ~ N(mu, s^2), to mu / sqrt(1 + pi/8 s^2). Of C classes, the log odds of class k against the geometric
    mean of the others are a_k = z_k - mean_{l != k} z_l = C / (C - 1) z'_k, with variance w_k. Shrinking each a_k by
    its own factor shrinks z'_k by the same one, and softmax makes the result a distribution.

    Of two classes w_k is Var[z_1 - z_2], and q_1 is MacKay's sigmoid. Noise that all logits share drops out, which it
    does not with Var[z_k] in the place of w_k. Shrinking the log odds of every pair of classes (Lu, Ie and Sha 2020,
    Mean-field approximation to the Gaussian-softmax integral) is 1.1 to 4 times further from Monte Carlo on posteriors
    of a last layer (docs/uncertainty.md).

    Args:
        mean: [..., C >= 2].
        covariance: [..., C, C], or its diagonal [..., C] where the logits are independent.
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
    spread = variance[..., :, None] + variance[..., None, :]
    if covariance.ndim > mean.ndim:
        spread = spread - 2 * covariance
    scale = (1 + math.pi / 8 * spread.clamp_min(0)).rsqrt()
    odds = (mean[..., None, :] - mean[..., :, None]) * scale
    return (-odds.logsumexp(-1)).log_softmax(-1)


@torch.no_grad()
def bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """[..., C] float64: concentrations alpha = A q of a Dirichlet distribution of p, q from ``probit``.

    In the softmax basis the log density of a Dirichlet has the Hessian -A F with F = diag(r) - r r' at its mean r
    (MacKay 1998). Of all N(., F^+ / A) the one nearest to N(., S), in KL divergence from the latter, has

        A = (C - 1) / tr(F S).

    r is the mean by pairs of classes, which for two classes is q. Of more, A at q gives epistemic uncertainties that
    are on average a tenth further from Monte Carlo on posteriors of a last layer (docs/uncertainty.md). For two classes
    A is that of Hobbhahn et al. with p for q. Theirs reads each alpha_k off S_kk on its own: with variances that differ
    from class to class it leaves the mean of the logits.

    Args and raises as ``probit``.
    """
    mean, covariance = mean.double(), covariance.double()
    variance, pairs = _variances(mean, covariance), _pairwise_probit(mean, covariance).exp()
    if covariance.ndim > mean.ndim:
        shared = (pairs[..., None, :] @ covariance @ pairs[..., :, None])[..., 0, 0]
    else:
        shared = (pairs.square() * variance).sum(-1)
    spread = (pairs * variance).sum(-1) - shared
    return probit(mean, covariance).exp() * ((mean.shape[-1] - 1) / spread.clamp_min(_SMALLEST_VARIANCE))[..., None]


@torch.no_grad()
def monte_carlo(mean: Tensor, covariance: Tensor, generator: torch.Generator, num_draws: int = NUM_DRAWS) -> Tensor:
    """[S, ..., C] draws of z, antithetic in pairs. All rows share their noise: a row does not depend on its batch.

    Args:
        generator: on the CPU.
        num_draws: S, even.
        mean, covariance: as for ``probit``, of at least one class; the covariance may be singular.
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
    # the symmetric root: unlike eigenvectors, of which any sign will do, it is a continuous function of the covariance
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return mean + torch.einsum("...cd,sd->s...c", root, noise)


def predict_by_probit(mean: Tensor, covariance: Tensor) -> GaussianPrediction:
    """From K components [K, ..., C] and [K, ..., C, C] (or [K, ..., C]); no aleatoric and epistemic part."""
    log_probs = probit(mean, covariance)
    return GaussianPrediction(mixture(log_probs), decompose(log_probs).total)


def predict_by_bridge(mean: Tensor, covariance: Tensor) -> GaussianPrediction:
    """From K components, as ``predict_by_probit``, in closed form.

    The epistemic uncertainty of a mixture is that between its components' q_k, by ``decompose``, plus the mean of those
    within: I(y; z, k) = I(y; k) + I(y; z | k). Within one, with a = alpha, A = sum a and psi the digamma function,

        I(y; z) = sum_c (a_c / A) [psi(a_c + 1) - log a_c] - [psi(A + 1) - log A].
    """
    alpha = bridge(mean, covariance)
    whole = alpha.sum(-1)
    probs = alpha / whole[..., None]
    slack = (probs * torch.digamma(alpha + 1) - torch.xlogy(probs, alpha)).sum(-1)
    within = (slack - torch.digamma(whole + 1) + whole.log()).clamp_min(0).mean(0)
    log_probs, between = predict(probit(mean.double(), covariance.double()))
    epistemic = between.epistemic + within
    aleatoric = (between.total - epistemic).clamp_min(0)
    log_probs, aleatoric, epistemic = (part.to(mean.dtype) for part in (log_probs, aleatoric, epistemic))
    return GaussianPrediction(log_probs, aleatoric + epistemic, aleatoric, epistemic)


def predict_by_monte_carlo(
    mean: Tensor, covariance: Tensor, *, num_draws: int = NUM_DRAWS, seed: int = 0
) -> GaussianPrediction:
    """From K components, as ``predict_by_probit``, with ``num_draws`` of each as members."""
    draws = monte_carlo(mean, covariance, torch.Generator().manual_seed(seed), num_draws)
    log_probs, uncertainty = predict(draws.flatten(0, 1))
    return GaussianPrediction(log_probs, *uncertainty)


LINKS: dict[str, Callable[[Tensor, Tensor], GaussianPrediction]] = {
    "monte_carlo": predict_by_monte_carlo,
    "probit": predict_by_probit,
    "bridge": predict_by_bridge,
}
"""From logits to probabilities, by name."""

PREDICTIONS: dict[str, str | None] = {
    "members": None,
    "linearised": "monte_carlo",
    "linearised_probit": "probit",
    "linearised_bridge": "bridge",
}
"""How a loaded posterior predicts, by the name that its file uses -> the link of its linearised outputs."""


@torch.no_grad()
def moments(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """[..., C] mean and variance of an equally weighted mixture of K Gaussians (law of total variance).

    Args:
        mean: [K, ..., C].
        covariance: [K, ..., C, C], or its diagonal.
    """
    variance = _variances(mean, covariance, least=1)
    return mean.mean(0), variance.mean(0) + mean.var(0, correction=0)


@torch.no_grad()
def log_density(values: Tensor, mean: Tensor, covariance: Tensor, noise_std: float) -> Tensor:
    """[...] log p(y) of numbers y = z + N(0, noise_std^2): the predictive density of a regression, in nats.

    Args:
        values: [..., C] y.
        mean: [K, ..., C] of K components.
        covariance: [K, ..., C, C], or its diagonal.
    """
    variance = _variances(mean, covariance, least=1)
    away, size = values - mean, mean.shape[-1]
    if covariance.ndim == mean.ndim:
        variance = variance + noise_std**2
        square, log_det = (away.square() / variance).sum(-1), variance.log().sum(-1)
    else:
        noise = noise_std**2 * torch.eye(size, dtype=mean.dtype, device=mean.device)
        factor = torch.linalg.cholesky(covariance + noise)
        white = torch.linalg.solve_triangular(factor, away[..., None], upper=False)
        square, log_det = white.square().sum((-2, -1)), 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    each = -0.5 * (square + log_det + size * math.log(2 * math.pi))
    return each.logsumexp(0) - math.log(len(mean))


def _variances(mean: Tensor, covariance: Tensor, *, least: int = 2) -> Tensor:
    """[..., C]: the diagonal, with everything checked."""
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
            f"{int((~covariance.isfinite()).sum())} covariances that are not finite, least variance "
            f"{float(variance.min()):.3g}: the model or its posterior has diverged"
        )
    return variance
