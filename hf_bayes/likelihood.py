"""log p(y | logits) of one term, for every member: what a model's outputs mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


class Likelihood(Protocol):
    """log p(labels | logits), term by term, and which labels are terms at all."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [M, N, C], labels [M, N] or [M, N, C] -> [M, N] nats in float32 or better; 0 where not a term."""
        ...

    def is_term(self, labels: Tensor) -> Tensor:
        """labels [..., N] (or [..., N, C]) -> bool [..., N]."""
        ...

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that labels of logits of shape ``answers`` [..., C] may have."""
        ...


@dataclass(frozen=True)
class Categorical:
    """Class indices; -100 is no term."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), ignore_index=IGNORE, reduction="none")
        return -nll.view(labels.shape)

    def is_term(self, labels: Tensor) -> Tensor:
        return labels != IGNORE

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers[:-1],)


@dataclass(frozen=True)
class Bernoulli:
    """Independent binary labels [.., C] in {0, 1}; an example is one term."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        return -F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum(-1)

    def is_term(self, labels: Tensor) -> Tensor:
        return torch.ones(labels.shape[:-1], dtype=torch.bool, device=labels.device)

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers,)


@dataclass(frozen=True)
class Normal:
    """y = logits + N(0, noise_std^2), the noise known.

    Attributes:
        noise_std: in units of the labels.
    """

    noise_std: float

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        z = (labels.to(logits.dtype).reshape(logits.shape) - logits) / self.noise_std
        return (-0.5 * z.square() - math.log(self.noise_std) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def is_term(self, labels: Tensor) -> Tensor:
        lead = labels.shape if labels.ndim == 1 else labels.shape[:-1]
        return torch.ones(lead, dtype=torch.bool, device=labels.device)

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers, answers[:-1]) if answers[-1] == 1 else (answers,)


def widened(logits: Tensor) -> Tensor:
    """In float32, or float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()
