"""Ordered classes: the cumulative logit model, P(y <= k) = sigmoid(c_k - f) (McCullagh 1980, Regression models for
ordinal data).

With cutpoints c_0 < ... < c_{K-2} the probability of class k is sigmoid(c_k - f) - sigmoid(c_{k-1} - f), with
c_{-1} = -infinity and c_{K-1} = infinity. With a = c_k - f and b = c_{k-1} - f,

    log (sigmoid(a) - sigmoid(b)) = log sigmoid(a) + log sigmoid(-b) + log(1 - exp(b - a)),

which stays exact where both sigmoids are 0 or 1 in floating point. The distance a - b = c_k - c_{k-1} is not computed
from a and b, which may be equal in floating point.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.core.number_checks import is_finite_number, is_integer
from hf_bayes.uncertainty.custom.base import ClassLogProbs, CustomLikelihood
from hf_bayes.uncertainty.custom.heteroscedastic import check_sizes

SMALLEST_GAP = 1e-6
"""The smallest distance between learnt cutpoints, so that no class has probability 0."""


@dataclass(frozen=True)
class Ordinal(CustomLikelihood):
    """Classes 0..K-1 with an order, such as ratings. A larger output means a larger class.

    Attributes:
        num_classes: K.
        cutpoints: K - 1 increasing numbers; the head has one output, f. None learns the cutpoints: the head has K - 1
            outputs o, with c_0 - f = -o_0, and softplus(o_k) is the distance from c_{k-1} to c_k.
    """

    name: ClassVar[str] = "ordinal"
    num_classes: int
    cutpoints: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(self.name, num_classes=self.num_classes - 1 if is_integer(self.num_classes) else 0)
        given = self.cutpoints
        if given is None:
            return
        fine = all(map(is_finite_number, given)) and all(a < b for a, b in pairwise(given))
        if len(given) != self.num_classes - 1 or not fine:
            raise ValueError(
                f"ordinal: cutpoints must be {self.num_classes - 1} increasing numbers for num_classes="
                f"{self.num_classes}, got {given}. None learns them"
            )

    @property
    def num_outputs(self) -> int:
        return self.num_classes - 1 if self.cutpoints is None else 1

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.predict(outputs).log_probs
        lead = torch.broadcast_shapes(log_probs.shape[:-1], labels.shape)
        return log_probs.expand(*lead, -1).gather(-1, labels.long().expand(lead)[..., None])[..., 0]

    def predict(self, outputs: Tensor) -> ClassLogProbs:
        bounds, gaps = self._bounds(outputs)
        below, above = F.logsigmoid(bounds), F.logsigmoid(-bounds)
        inner = below[..., 1:] + above[..., :-1] + (-(-gaps).expm1()).log()
        return ClassLogProbs(torch.cat([below[..., :1], inner, above[..., -1:]], -1))

    def _bounds(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cutpoints minus f, [..., K - 1], and the distances between them, [..., K - 2] or [K - 2].

        Differences of the former would be 0 where a small distance is rounded away beside a large f.
        """
        if self.cutpoints is not None:
            cutpoints = torch.tensor(self.cutpoints, dtype=torch.float64)
            return cutpoints.to(outputs) - outputs, cutpoints.diff().to(outputs)
        gaps = F.softplus(outputs[..., 1:]) + SMALLEST_GAP
        return torch.cat([-outputs[..., :1], gaps], -1).cumsum(-1), gaps
