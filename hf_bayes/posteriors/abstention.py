"""A stored threshold of an uncertainty: answers above it are withheld. ``decide.threshold`` fits it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_bayes.core.number_checks import is_integer, is_number
from hf_bayes.posteriors.student import DISTILLED
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS

CLASS_MEASURES = ("one_minus_confidence", "total", "aleatoric", "epistemic")
"""The uncertainties of a class: 1 - the mixture's largest probability, or a part of its entropy in nats."""
ANSWER_MEASURES = ("nll_per_token", "largest_epistemic", "total", "aleatoric", "epistemic")
"""The uncertainties of a text in nats: -log-probability per token, the largest EU of a token, or means over tokens."""
MEASURES = tuple(dict.fromkeys(CLASS_MEASURES + ANSWER_MEASURES))


@dataclass(frozen=True, kw_only=True)
class Abstention:
    """A rule that withholds an answer if its uncertainty exceeds a threshold, and the promise for the other answers.

    Attributes:
        measure: the uncertainty, one of ``MEASURES``.
        threshold: the largest uncertainty of an answer that is given.
        error_rate: the promised limit of the error rate among answered rows.
        failure_rate: the probability, over held-out rows, with which the promise may fail.
        num_rows: the number of held-out rows.
        answered: the share of them that was answered.
        heldout_error_rate: the error rate of the answered ones.
        num_members: the number of members of the prediction; None if predictions of any number may be judged.
        prediction: the way of prediction, one of ``gaussian_links.PREDICTIONS``, or "distilled".
        temperature: the temperature of the mixture.
    """

    measure: str
    threshold: float
    error_rate: float
    failure_rate: float
    num_rows: int
    answered: float
    heldout_error_rate: float
    num_members: int | None = None
    prediction: str = "members"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(self.measure in MEASURES, "measure", self.measure, f"one of {', '.join(MEASURES)}")
        for name in ("threshold", "temperature"):
            value = getattr(self, name)
            _require(is_number(value) and math.isfinite(value), name, value, "a finite number")
        _require(self.temperature > 0, "temperature", self.temperature, "> 0")
        for name in ("error_rate", "failure_rate"):
            value = getattr(self, name)
            _require(is_number(value) and 0 < value < 1, name, value, "a number between 0 and 1")
        for name in ("answered", "heldout_error_rate"):
            value = getattr(self, name)
            _require(is_number(value) and 0 <= value <= 1, name, value, "a number from 0 to 1")
        _require(is_integer(self.num_rows, 1, 2**63), "num_rows", self.num_rows, "an integer >= 1")
        fine = self.num_members is None or is_integer(self.num_members, 0, 2**63)
        _require(fine, "num_members", self.num_members, "an integer >= 0, or null")
        known = [*PREDICTIONS, DISTILLED]
        _require(self.prediction in known, "prediction", self.prediction, f"one of {', '.join(known)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Abstention:
        """Return the rule of a parsed file.

        Raises:
            ValueError: for missing or unknown keys, and for values out of their range.
        """
        keys = set(cls.__dataclass_fields__)
        if set(values) != keys:
            raise ValueError(f"abstention must be the keys {sorted(keys)}, or no keys, got {sorted(values)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    def abstains(self, uncertainty: float) -> bool:
        """Return True if an answer of this uncertainty is withheld; NaN is withheld, too."""
        return not uncertainty <= self.threshold


def _require(fine: Any, name: str, value: Any, expected: str) -> None:
    if not fine:
        raise ValueError(f"abstention.{name} must be {expected}, got {value!r:.100}")
