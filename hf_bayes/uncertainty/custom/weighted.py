"""Weighted rows: sum_i w_i log p(y_i | outputs_i), with a weight for each row from a column of the data.

A row of weight 3 contributes as three copies of it do, and a row of weight 0 contributes nothing. N still counts rows,
so weights of mean 1 leave the strength of the likelihood and the unit of the step size as they are.

The labels carry the weight: they are [..., D + 1], the numbers of the label and then its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import CustomLikelihood, LikelihoodConfig
from hf_bayes.uncertainty.likelihoods import Likelihood


@dataclass(frozen=True)
class Weighted(LikelihoodConfig):
    """The likelihood of a head, or another likelihood, with a weight for each row.

    Attributes:
        of: the likelihood that is weighted; None takes the one that belongs to the head's configuration.
        column: the column of the data that holds the weights.
    """

    name: ClassVar[str] = "weighted"
    of: CustomLikelihood | None = None
    column: str = "weight"

    def __post_init__(self) -> None:
        if self.of is not None and not isinstance(self.of, CustomLikelihood):
            raise ValueError(
                f"weighted: of must be a CustomLikelihood, or None for the head's own, got {self.of!r:.100}"
            )
        if not isinstance(self.column, str) or not self.column:
            raise ValueError(f"weighted: column must be the name of a column of the data, got {self.column!r}")

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.column,)

    @property
    def advice(self) -> str:  # type: ignore[override]
        """The remedy if the log-likelihood is not finite."""
        return "" if self.of is None else self.of.advice

    @property
    def weighs_head(self) -> bool:  # type: ignore[override]
        return self.of is None

    def build(self, num_outputs: int, of_head: Callable[[], Likelihood]) -> Likelihood:
        return WeightedRows(self, of_head() if self.of is None else Adapted(self.of, num_outputs))


@dataclass(frozen=True)
class WeightedRows(Likelihood):
    """The weighted form of a likelihood, for labels [..., D + 1] whose last number is the weight.

    The Fisher information of a term needs its weight, which the outputs do not hold. So curvature is available as
    empirical Fisher matrices only, whose scores are of labels with weights. ``noise_std`` is None: fits of the noise
    count residuals without weights.

    Attributes:
        config: the settings.
        inner: the likelihood that is weighted.
    """

    lacks = frozenset({"draw", "fisher"})
    config: Weighted = field()  # field(): without a default, which the base class has
    inner: Likelihood

    @property
    def predicts_classes(self) -> bool:
        return self.inner.predicts_classes

    @property
    def predicts_numbers(self) -> bool:
        return self.inner.predicts_numbers

    @property
    def has_check(self) -> bool:
        return self.inner.has_check

    def parts(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels as the inner likelihood takes them, and weights [...]."""
        inner, weights = labels[..., :-1], labels[..., -1]
        if not (self.inner.predicts_numbers or self._takes_columns):  # the index of a class
            return inner[..., 0].long(), weights
        return inner[..., 0] if inner.shape[-1] == 1 and not self._takes_columns else inner, weights

    @property
    def _takes_columns(self) -> bool:
        return self.inner.label_shapes((1, 1)) == ((1, 1),)

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        inner, weights = self.parts(labels)
        found = self.inner.log_prob(logits, inner)
        return found * weights.to(found.dtype)

    def log_prob_parts(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.inner.log_prob_parts(logits, self.parts(labels)[0])

    def max_log_prob(self, num_outputs: int) -> float:
        return self.inner.max_log_prob(num_outputs)

    def is_term(self, labels: Tensor) -> Tensor:
        return self.inner.is_term(self.parts(labels)[0])

    def weights(self, labels: Tensor) -> Tensor:
        return self.parts(labels)[1]

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        lead = logits_shape[:-1]
        inner = self.inner.label_shapes(logits_shape)
        sizes = {1 if shape == lead else shape[-1] for shape in inner}
        return tuple((*lead, size + 1) for size in sorted(sizes))

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        inner, weights = self.parts(labels)
        found = self.inner.outside(inner, num_outputs)
        found = found[..., None] if found.ndim < labels.ndim else found
        return torch.cat([found, ~(weights.isfinite() & (weights >= 0))[..., None]], -1)

    def support(self, num_outputs: int) -> str:
        return f"{self.inner.support(num_outputs)}, with a finite weight >= 0 in the column {self.config.column!r}"

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        return self.inner.identified(logits, columns)

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        inner, weights = self.parts(labels)
        found = self.inner.score(logits, inner)
        return found * weights.to(found.dtype)[:, None]

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        raise NotImplementedError

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        raise NotImplementedError

    def num_root_columns(self, num_outputs: int) -> int:
        return self.inner.num_root_columns(num_outputs)

    def check(self, logits: Tensor, labels: Tensor) -> None:
        self.inner.check(logits, self.parts(labels)[0])


def without_weights(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood under which each row counts once: the weighted one of ``WeightedRows``."""
    return likelihood.inner if isinstance(likelihood, WeightedRows) else likelihood
