"""The network of ``agps_probe`` on handwritten digits: its energy, its predictions, and barriers between networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from hf_bayes.core.rng import generator
from hf_bayes.metrics import expected_calibration_error
from scripts.reproduce.minibatches import passes

PIXELS, HIDDEN, CLASSES = 64, 30, 10
SIZES = (PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES)
PRIOR_STD = 0.5
NUM_TRAIN = 1200


class Digits(NamedTuple):
    """The rows of scikit-learn's 8 x 8 handwritten digits: x [n, 64] in [0, 1], y [n]."""

    x: Tensor
    y: Tensor

    @classmethod
    def split(cls) -> tuple[Digits, Digits]:
        """Split the rows: 1200 for training, all further ones for testing."""
        data = load_digits()
        order = torch.randperm(len(data.target), generator=generator("digits"))
        x, y = torch.from_numpy(data.data).float()[order] / 16, torch.from_numpy(data.target)[order]
        return cls(x[:NUM_TRAIN], y[:NUM_TRAIN]), cls(x[NUM_TRAIN:], y[NUM_TRAIN:])

    def nll(self, theta: Tensor, picked: Tensor | None = None) -> Tensor:
        """Return the mean NLL [M] over all rows, or over the ``picked`` rows [M, B] of each member."""
        x, y = (self.x, self.y) if picked is None else (self.x[picked], self.y[picked])
        labels = y.expand(len(theta), -1)
        return F.cross_entropy(logits(theta, x).mT, labels, reduction="none").mean(1)

    def energy(self, theta: Tensor, picked: Tensor | None = None) -> Tensor:
        """Return U [M] of the posterior with prior N(0, 0.5^2)."""
        return len(self.x) * self.nll(theta, picked) + 0.5 * theta.square().sum(1) / PRIOR_STD**2

    def batches(self, members: int, size: int, seed: int) -> Callable[[], Iterator[Tensor]]:
        """Return passes over the rows, in a separate order for each member."""
        return passes(len(self.x), members, size, generator(seed, "order"))


def logits(theta: Tensor, x: Tensor) -> Tensor:
    """Return logits [M, n, 10] of theta [M, d] at x [n, 64] or [M, n, 64], for one hidden layer of 30 ReLUs."""
    w1, b1, w2, b2 = theta.split(SIZES, 1)
    x = x.expand(len(theta), -1, -1)
    hidden = torch.baddbmm(b1[:, None], x, w1.unflatten(1, (PIXELS, HIDDEN))).relu()
    return torch.baddbmm(b2[:, None], hidden, w2.unflatten(1, (HIDDEN, CLASSES)))


def untrained(members: int, seed: int) -> Tensor:
    """Return new networks [M, d]: weights N(0, 2 / fan-in) and N(0, 1 / fan-in), biases 0."""
    rng = generator(seed, "untrained")
    scales = (math.sqrt(2 / PIXELS), 0.0, math.sqrt(1 / HIDDEN), 0.0)
    return torch.cat([s * torch.randn(members, n, generator=rng) for s, n in zip(scales, SIZES, strict=True)], 1)


def barrier(first: Tensor, second: Tensor, train: Digits) -> Tensor:
    """Return [M]: the largest rise of the training NLL between two ends [M, d] above the line through their NLLs."""
    at = torch.linspace(0, 1, 21).tolist()
    along = torch.stack([train.nll(torch.lerp(first, second, t)) for t in at])
    straight = torch.stack([torch.lerp(along[0], along[-1], t) for t in at])
    return (along - straight).amax(0)


def predictions(draws: Tensor, test: Digits) -> dict[str, float]:
    """Return the error in percent and NLL in nats of the mixture of draws [S, d], and the mean NLL of single draws."""
    log_probs = logits(draws, test.x).double().log_softmax(-1)
    mixed = log_probs.logsumexp(0) - math.log(len(draws))
    confidence, label = mixed.exp().max(1)
    correct = (label == test.y).double()
    return {
        "accuracy": 100 * float(correct.mean()),
        "ece": 100 * expected_calibration_error(confidence.numpy(), correct.numpy()),
        "nll": float(F.nll_loss(mixed, test.y)),
        "single": float(test.nll(draws).mean()),
    }
