"""The comparison of a chosen trial with guessing: the label frequencies of all other rows as the prediction."""

from __future__ import annotations

import math
from collections import Counter
from operator import index
from typing import Any

from datasets import Dataset

from hf_bayes.models.base import BayesianModel
from hf_bayes.training.tuning.record import TuningTrial
from hf_bayes.uncertainty.likelihoods import Categorical

_COLUMNS = ("labels", "label")
"""The columns in which transformers' collators find the labels of a row."""


def guess(model: BayesianModel, train_dataset: Any, eval_dataset: Any) -> TuningTrial | None:
    """Return a trial that predicts every held-out row by the label frequencies of all other rows.

    Each class counts once more than it occurs, so that a label without other rows has a probability.

    Args:
        model: attached.
        train_dataset, eval_dataset: rows with labels.
    Returns:
        None unless every row has one class, in a column of a ``datasets.Dataset``.
    """
    if type(model.likelihood) is not Categorical:
        return None
    train, heldout = _classes(train_dataset), _classes(eval_dataset)
    if not train or not heldout or min(*train, *heldout) < 0:  # -100 is no term
        return None
    counts = Counter([*train, *heldout])
    total = counts.total() - 1 + model.num_outputs  # without the row itself, and each class once more
    nll = [math.log(total / counts[label]) for label in heldout]
    return TuningTrial("guessing by label frequencies", 0, 0.0, 0, {}, nll, [1] * len(nll))


def warning(chosen: TuningTrial, guessed: TuningTrial | None) -> str:
    """Return a sentence, with a space before it, if a trial is no better than guessing by one standard error."""
    if guessed is None or len(guessed.nll) != len(chosen.nll):
        return ""
    difference, error = chosen.difference(guessed)
    if difference < -error:
        return ""
    return (
        f" It is no better than guessing by the label frequencies ({guessed.mean_nll:.4f}): raise the budget, or check "
        "the labels and what is trained."
    )


def _classes(dataset: Any) -> list[int] | None:
    """Return the class of each row; None if they are no column of integers that can be read without the rows."""
    if not isinstance(dataset, Dataset):
        return None
    names = [name for name in _COLUMNS if name in dataset.column_names]
    if len(names) != 1 or dataset.format["type"] == "custom":  # a transform makes whole rows
        return None
    try:
        return [index(label) for label in dataset.with_format(None)[names[0]]]
    except TypeError:
        return None
