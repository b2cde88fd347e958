"""Preferences between two texts: P(first is preferred) = sigmoid(r_first - r_second) (Bradley and Terry 1952).

r is a reward, the one output of the model for a text. With the two rewards of a pair as outputs, this is the
categorical likelihood with two classes:

    log sigmoid(r_0 - r_1) = log softmax(r_0, r_1)_0.

A constant that is added to all rewards of a member has no effect. So only differences of rewards are determined by
preferences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood


@dataclass(frozen=True)
class BradleyTerry(LikelihoodConfig):
    """The likelihood of preferences, for a model with one output, the reward of a text.

    A row of the data is a pair of texts: ``input_ids`` [B, 2, T]. A label is the index of the preferred text, 0 or 1.
    """

    name: ClassVar[str] = "bradley_terry"
    instead_of_pipeline: ClassVar[str] = (
        "a reward is no probability, because preferences determine differences of rewards only: use "
        "hf_bayes.RewardModel (docs/rewards.md)"
    )

    def build(self, num_outputs: int, of_head: Callable[[], Likelihood]) -> Likelihood:
        if num_outputs != 1:
            raise ValueError(
                f"the likelihood bradley_terry needs a model with one output, the reward of a text, got {num_outputs}: "
                "set num_labels=1 in the model's config"
            )
        return Preferences(self)


@dataclass(frozen=True)
class Preferences(Likelihood):
    """The likelihood of pairs, given the rewards [..., 2] of their texts.

    Attributes:
        config: the settings.
        texts_per_row: the number of texts in a row of the data.
    """

    texts_per_row = 2
    config: LikelihoodConfig = field()  # field(): without a default, which the base class has

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CHOICE.log_prob(logits, labels)

    def max_log_prob(self, num_outputs: int) -> float:
        return 0.0

    def is_term(self, labels: Tensor) -> Tensor:
        return _CHOICE.is_term(labels)

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        # rewards of single texts, [B, 1], have no labels
        return (logits_shape[:-1],) if logits_shape[-1] == self.texts_per_row else ()

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        return _CHOICE.outside(labels, self.texts_per_row)

    def support(self, num_outputs: int) -> str:
        return _CHOICE.support(self.texts_per_row)

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        return _CHOICE.identified(logits, columns)

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CHOICE.score(logits, labels)

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return _CHOICE.draw(logits, uniforms)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        return _CHOICE.fisher_root(logits, column)

    def num_root_columns(self, num_outputs: int) -> int:
        return _CHOICE.num_root_columns(self.texts_per_row)

    @property
    def labels_per_output(self) -> bool:
        return _CHOICE.labels_per_output


_CHOICE = Categorical()
