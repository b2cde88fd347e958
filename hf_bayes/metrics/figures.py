"""The figures of each kind of labels: classes, next tokens, tags of words, several labels, numbers, and
numbers under a user's likelihood.

Statistics have a name and the shape [R, T]: R rows (texts, or windows of a text) of T terms (one class, T tokens, or T
outputs). Rows of tokens may have fewer terms than T; the further places are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_bayes.metrics.functions import expected_calibration_error, perplexity, reliability
from hf_bayes.metrics.regression import deviation_bins, expected_normalized_calibration_error, interval_coverage

Array = NDArray[np.float64]
Statistics = Mapping[str, Array]

LEVELS = tuple(level / 20 for level in range(1, 20))
"""The nominal levels of the predictive intervals in the diagram of coverage."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a kind of labels.

    Attributes:
        kind: the name of the kind in results.
        means: name of a figure -> the statistic whose mean over all terms it is. Statistics that a model does not
            define are left out.
        functions: name of a figure -> the function that computes it from statistics.
        measures: the statistics by which rows are ordered: higher means less certain.
        confidence: True if rows are also ordered by 1 - the statistic ``confidence``.
        loss: the loss [R, T] of a risk-coverage curve.
        diagrams: name -> the function that returns the lists of numbers of a diagram.
    """

    kind: str
    means: Mapping[str, str]
    functions: Mapping[str, Callable[[Statistics], float]]
    measures: tuple[str, ...]
    confidence: bool
    loss: Callable[[Statistics], Array]
    diagrams: Mapping[str, Callable[[Statistics], dict[str, Any]]] = field(default_factory=dict)


def terms(values: Array) -> Array:
    """Return the values of all terms of all rows as one vector."""
    flat = values.ravel()
    return flat[~np.isnan(flat)]


def _lists(bins: Any) -> dict[str, list[float | None]]:
    """Return the lists of a record of vectors; None where a value is not defined."""
    return {
        name: [None if np.isnan(value) else float(value) for value in values] for name, values in bins._asdict().items()
    }


_NATS = {name: name for name in ("nll", "member_nll", "total", "aleatoric", "epistemic")}

# -- one class for each term ----------------------------------------------------------------------------------------


def _ece(found: Statistics) -> float:
    return expected_calibration_error(terms(found["confidence"]), terms(found["correct"]))


CLASSES = Figures(
    kind="classes",
    means={**_NATS, "brier": "brier", "accuracy": "correct"},
    functions={"ece": _ece},
    measures=("total", "epistemic"),
    confidence=True,
    loss=lambda found: 1 - found["correct"],
    diagrams={"reliability": lambda found: _lists(reliability(terms(found["confidence"]), terms(found["correct"])))},
)

NEXT_TOKENS = Figures(
    kind="next_tokens",
    means=CLASSES.means,
    functions={"perplexity": lambda found: perplexity(float(terms(found["nll"]).mean())), **CLASSES.functions},
    measures=CLASSES.measures,
    confidence=True,
    loss=CLASSES.loss,
    diagrams=CLASSES.diagrams,
)


def _macro_f1(found: Statistics) -> float:
    """Return the mean F1 of the classes that occur as a label or as a prediction."""
    from sklearn.metrics import f1_score

    label, predicted = terms(found["label"]), terms(found["predicted"])
    return float(f1_score(label, predicted, average="macro", zero_division=0.0))


TAGS = replace(CLASSES, kind="tags", functions={"macro_f1": _macro_f1, **CLASSES.functions})

# -- several labels -------------------------------------------------------------------------------------------------


def _f1(average: str) -> Callable[[Statistics], float]:
    """Return the F1 of the labels with a probability above one half; a label that never occurs counts 0."""

    def score(found: Statistics) -> float:
        from sklearn.metrics import f1_score

        given, predicted = found["label"] > 0.5, found["probability"] > 0.5
        if given.shape[1] == 1:  # scikit-learn reads one column as two classes, and would count "absent", too
            return float(f1_score(given.ravel(), predicted.ravel(), average="binary", zero_division=0.0))
        return float(f1_score(given, predicted, average=average, zero_division=0.0))

    return score


SEVERAL_LABELS = Figures(
    kind="several_labels",
    means={**_NATS, "exact_match": "correct", "label_nll": "label_nll", "brier": "brier"},
    functions={
        "micro_f1": _f1("micro"),
        "macro_f1": _f1("macro"),
        "ece": lambda found: expected_calibration_error(found["probability"].ravel(), found["label"].ravel()),
    },
    measures=("total", "epistemic"),
    confidence=True,
    loss=lambda found: 1 - found["correct"],
    diagrams={"reliability": lambda found: _lists(reliability(found["probability"].ravel(), found["label"].ravel()))},
)

# -- numbers --------------------------------------------------------------------------------------------------------


def _rmse(found: Statistics) -> float:
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(found["label"].ravel(), found["prediction"].ravel()))


def _errors(found: Statistics) -> tuple[Array, Array]:
    """Return the errors and the predicted deviations of all labels."""
    return (found["label"] - found["prediction"]).ravel(), found["predictive_std"].ravel()


def _standardised(found: Statistics) -> float:
    """Return the root mean square of the errors in units of their predicted deviations; 1 if these are right."""
    error, deviation = _errors(found)
    return float(np.sqrt(np.square(error / deviation).mean()))


def _coverage(level: float) -> Callable[[Statistics], float]:
    return lambda found: float(interval_coverage(found["below"].ravel(), level))


NUMBERS = Figures(
    kind="numbers",
    means={name: name for name in ("nll", "member_nll", "predictive_std", "epistemic_std")},
    functions={
        "rmse": _rmse,
        **{f"coverage_{percent}": _coverage(percent / 100) for percent in (50, 90, 95)},
        "standardised_rmse": _standardised,
        "ence": lambda found: expected_normalized_calibration_error(*_errors(found)),
    },
    # the noise is constant, so the predictive deviation orders rows of one output as the epistemic one does
    measures=("epistemic_std",),
    confidence=False,
    loss=lambda found: np.square(found["label"] - found["prediction"]),
    diagrams={
        "coverage": lambda found: {
            "level": list(LEVELS),
            "covered": interval_coverage(found["below"].ravel(), LEVELS).tolist(),
        },
        "deviations": lambda found: _lists(deviation_bins(*_errors(found))),
    },
)

# a likelihood of numbers has a density, and need not have a distribution function
_OF_ERRORS = ("rmse", "standardised_rmse", "ence")
OWN_NUMBERS = replace(
    NUMBERS,
    kind="own_numbers",
    means={name: name for name in ("nll", "member_nll", "predictive_std", "aleatoric_std", "epistemic_std")},
    functions={name: NUMBERS.functions[name] for name in _OF_ERRORS},
    measures=("predictive_std", "epistemic_std"),  # the noise may depend on the input
    diagrams={"deviations": NUMBERS.diagrams["deviations"]},
)
