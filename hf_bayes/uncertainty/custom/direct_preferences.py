"""Preferences between two answers of a language model, the likelihood of DPO (Rafailov et al. 2023).

The reward of an answer y to a prompt x is implicit, in how far the model departs from a reference model:

    r(x, y) = beta (log p(y | x) - log p_ref(y | x)),    P(first is preferred) = sigmoid(r_first - r_second).

So DPO is the Bradley-Terry likelihood of these rewards. Its negative logarithm is the loss "sigmoid" of TRL's
DPOTrainer. beta is the scale of the rewards, and a part of the likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.bradley_terry import Preferences
from hf_bayes.uncertainty.likelihoods import Likelihood

START = "start"
"""The reference of a run without a reference model of its own: the model before the first update."""


@dataclass(frozen=True)
class DirectPreferences(LikelihoodConfig):
    """The likelihood of preferences between answers, for causal language models.

    A row of the data has two texts: ``input_ids`` [2, T], ``attention_mask`` and ``completion_mask`` [2, T], which is 1
    at the tokens of the answers. A label is the index of the preferred text, 0 or 1.

    Attributes:
        beta: the scale of the rewards.
        reference: "start" if the reference is the model before the first update, else the name of the reference model.
    Raises:
        ValueError: for a beta that is not positive.
    """

    name: ClassVar[str] = "direct_preferences"
    stored_as: ClassVar[str] = "preferences"
    beta: float = 0.1
    reference: str = START

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(
                f"beta must be > 0, got {self.beta}: with 0 the model has no influence on the likelihood, and below 0 "
                "it prefers the rejected answers. TRL's default is 0.1"
            )

    def build(self, num_outputs: int, of_head: Callable[[], Likelihood]) -> Likelihood:
        """Raise a ValueError: heads have no answers. Language models use ``of_rewards``."""
        raise ValueError(
            "the likelihood direct_preferences is of the answers of a causal language model, got a model with "
            f"{num_outputs} outputs: for a reward model take BradleyTerry() (docs/rewards.md)"
        )

    def of_rewards(self) -> Preferences:
        """Return the likelihood of pairs, given their rewards [..., 2]."""
        return Preferences(self)
