"""The logistic regression of ``exact_widths`` with weights B A: a Gaussian A, a point B, and their exact optimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation
from scripts.reproduce.exact_widths import DIM, Optimum, Regression, minimise


@dataclass(frozen=True)
class FactoredRegression(Regression):
    """p(y = 1 | x) = sigmoid(B A x) with A [1, 6] and B [1, 1], both with the prior N(0, prior_std^2).

    theta [7] is (A, B). Given the point B, the logits of a Gaussian A are Gaussian, so F is a quadrature of one
    dimension for each row. A start with B > 0 stays on one side of the symmetry (A, B) -> (-A, -B).
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"layer.lora_A.default.weight": (1, DIM), "layer.lora_B.default.weight": (1, 1)}

    @property
    def start(self) -> Tensor:
        # A is about as large as its prior in the best q, so that B is about as large as 1 / prior_std
        return torch.tensor([*[0.0] * DIM, 1 / self.prior_std], dtype=torch.float64)

    def evaluate(self, theta: Tensor, rows: Tensor | None) -> Evaluation:
        """Return log p(D | theta) and its gradient from ``rows`` [M, B] of each chain; None means all rows."""
        a, b = theta[:, :DIM], theta[:, DIM:]
        found = super().evaluate(b * a, rows)
        gradient = found.grad_log_lik
        assert gradient is not None
        return found._replace(grad_log_lik=torch.cat([b * gradient, (a * gradient).sum(1, keepdim=True)], 1))

    def free_energy(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E_q[U] - H[q of A] up to a constant, for a mean [7] and a covariance [7, 7] of (A, B)."""
        a, b, of_a = mean[:DIM], mean[DIM], covariance[:DIM, :DIM]
        prior = 0.5 * (mean.square().sum() + of_a.diagonal().sum()) / self.prior_std**2
        return self.loss(b * a, b.square() * of_a) + prior - 0.5 * torch.logdet(of_a)

    def widths(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return the standard deviations [..., 6] of the weights B A, which the data determine without the prior."""
        return mean[..., DIM:].abs() * std[..., :DIM]

    def optimum(self, *, full: bool = False) -> Optimum:
        """Return the best q with a diagonal covariance of A; the covariance of B is 0."""
        assert not full

        def unpacked(numbers: Tensor) -> tuple[Tensor, Tensor]:
            variances = (2 * numbers[DIM + 1 :]).exp()
            return numbers[: DIM + 1], torch.diag(torch.cat([variances, torch.zeros_like(variances[:1])]))

        start = torch.cat([self.start, torch.zeros(DIM, dtype=torch.float64)])
        return minimise(self.free_energy, unpacked, start)
