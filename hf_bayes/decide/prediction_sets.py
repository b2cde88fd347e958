"""Sets of classes that contain the label with a promised probability (split conformal prediction).

With the score s(x, y) of a class, the set of x holds each class of score at most q, where q is the k-th smallest score
of the n held-out labels, k = ceil((n + 1) coverage). If held-out rows and new rows are exchangeable, then

    coverage <= P(label in set) <= coverage + 1 / (n + 1)

on average over held-out rows and new rows; the upper bound needs scores without ties (Vovk et al. 2005; Lei et al.
2018, theorem 2). The promise is for all rows together, not for each class. It holds for any probabilities. Better ones
give smaller sets.

The scores are functions of the mixture's probabilities p:

* "lac": 1 - p_y (Sadinle et al. 2019). The sets are the smallest on average, and may be empty.
* "aps": the probability of all classes above y, plus u p_y with u uniform on [0, 1] (Romano et al. 2020, eq. 5 and 8).
  The sets adapt to how hard a row is. Without ``randomise``, u is 0, and the sets are those of the paper's eq. 3. They
  always hold the likeliest class, which has the score 0, and so may cover more than promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_number
from hf_bayes.core.rng import device_of

Score = Literal["lac", "aps"]
SCORES: tuple[Score, ...] = ("lac", "aps")


@dataclass(frozen=True, kw_only=True)
class PredictionSets:
    """A rule that gives sets of classes.

    Attributes:
        score: one of ``SCORES``.
        limit: q, the largest score of a class in a set.
        coverage: the promised probability that a set contains the label.
        num_rows: the number of held-out rows.
        randomise: True if "aps" draws a uniform number for each row.
    """

    score: Score
    limit: float
    coverage: float
    num_rows: int
    randomise: bool

    def __call__(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return [..., C] bool: the classes of each set.

        Args:
            log_probs: [..., C] of the mixture, such as ``logits`` of a Bayesian classifier.
            generator: draws the uniform numbers of a randomised rule; None is torch's global generator.
        Raises:
            ValueError: if a row holds NaN.
        """
        return _scores(log_probs, self.score, self.randomise, generator) <= self.limit


def fit_prediction_sets(
    log_probs: Tensor,
    labels: Tensor,
    *,
    coverage: float,
    score: Score = "aps",
    randomise: bool = True,
    generator: torch.Generator | None = None,
) -> PredictionSets:
    """Return the rule for a promised coverage, from held-out rows.

    Args:
        log_probs: [N, C] of the mixture on rows that were used neither in training nor for a temperature.
        labels: [N] classes.
        coverage: the promised probability that a set contains the label.
        score: one of ``SCORES``.
        randomise: False for sets of "aps" that depend on the row alone, are never empty, and may cover more than
            promised.
        generator: as in ``PredictionSets``.
    Raises:
        ValueError: for too few rows (with the number that would do), labels that do not fit, and NaN in a row.
    """
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}: expected one of {', '.join(SCORES)}")
    if not is_number(coverage) or not 0 < coverage < 1:
        raise ValueError(f"coverage must be a number between 0 and 1, got {coverage!r}: give for example 0.9")
    if log_probs.ndim != 2 or labels.shape != log_probs.shape[:1]:
        raise ValueError(
            f"one label is needed for each row of log_probs [N, C], got labels {list(labels.shape)} and log_probs "
            f"{list(log_probs.shape)}"
        )
    _check_labels(labels, log_probs.shape[1])
    num_rows, randomise = len(labels), randomise and score == "aps"
    # 1e-9: (n + 1) coverage that is an integer must not be rounded up by its error in float64
    place = math.ceil((num_rows + 1) * coverage - 1e-9)
    if place > num_rows:
        enough = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise ValueError(f"a coverage of {coverage:g} needs at least {enough} held-out rows, got {num_rows}: give more")
    scores = _scores(log_probs, score, randomise, generator)
    of_labels = scores.gather(1, labels[:, None].to(scores.device, torch.long))[:, 0]
    limit = of_labels.kthvalue(place).values.item()
    return PredictionSets(score=score, limit=limit, coverage=coverage, num_rows=num_rows, randomise=randomise)


def _check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise for labels that are no classes."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be the numbers of classes as integers, got {labels.dtype}")
    outside = (labels < 0) | (labels >= num_classes)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"labels must be classes from 0 to {num_classes - 1}, as log_probs has {num_classes}, got "
            f"{int(labels[row])} in row {row}: leave out rows without a label"
        )


def _scores(log_probs: Tensor, score: Score, randomise: bool, generator: torch.Generator | None) -> Tensor:
    """Return [..., C] scores of all classes in float64; low for likely classes."""
    probs = log_probs.double().softmax(-1)
    if bool(probs.isnan().any()):
        row = probs.isnan().any(-1).nonzero()[0].tolist()
        raise ValueError(
            f"log_probs of row {row} have no probabilities: they hold NaN or inf, or all are -inf. The model or its "
            "posterior has diverged"
        )
    if score == "lac":
        return 1 - probs
    ordered, order = probs.sort(-1, descending=True)
    above = ordered.cumsum(-1) - ordered
    if not randomise:
        return torch.empty_like(probs).scatter_(-1, order, above)
    shape = *probs.shape[:-1], 1
    share = torch.rand(shape, dtype=probs.dtype, generator=generator, device=device_of(generator)).to(probs.device)
    return torch.empty_like(probs).scatter_(-1, order, above + share * ordered)
