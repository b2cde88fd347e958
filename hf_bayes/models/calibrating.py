"""A pass over held-out rows for the temperature of a model's mixture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_bayes.metrics.calibration import NUM_GROUPS, Calibration, GroupSums, fit_calibration
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictors import Predictive, num_averaged


def calibration_of(
    model: BayesianModel,
    batches: Iterable[dict[str, Any]],
    *,
    num_members: int | None = None,
    numbers: Iterator[int] | None = None,
    add_up: Callable[[Tensor], Any] = lambda sums: None,
) -> Calibration:
    """Return the temperature of the mixture of the model's current members.

    Args:
        batches: held-out rows with ``labels``.
        num_members: the number of members in all processes; None if all are in this one.
        numbers: the number of each row, which decides on its group; None counts the rows.
        add_up: adds a tensor up over the processes that have other rows, in place.
    Raises:
        ValueError: for too few rows, labels that are numbers, or a mixture that has a temperature already.
    """
    sums = heldout_sums(model, batches, numbers=numbers)
    add_up(sums.curves)
    add_up(sums.terms)
    return fit_to(model, sums, num_members=num_members)


def heldout_sums(
    model: BayesianModel, batches: Iterable[dict[str, Any]], *, numbers: Iterator[int] | None = None
) -> GroupSums:
    """Return the sums over held-out rows to which a temperature is fitted.

    Args:
        batches: held-out rows with ``labels``.
        numbers: the number of each row, which decides on its group; None counts the rows.
    """
    sums, numbers = GroupSums.empty(), itertools.count() if numbers is None else numbers
    for batch in batches:
        if batch.get("labels") is None:  # no likelihood term
            continue
        found, _ = model.read_predictions(batch, _nll_at_temperatures)
        terms = model.terms_per_row(batch).cpu()
        groups = torch.tensor([next(numbers) % NUM_GROUPS for _ in terms])
        sums.add(found["nll"], groups.repeat_interleave(terms))
    return sums


def fit_to(model: BayesianModel, sums: GroupSums, *, num_members: int | None = None) -> Calibration:
    """Return the temperature that fits the sums over rows, for the way in which the model predicts now."""
    count = len(model.current) if num_members is None else num_members
    return fit_calibration(
        sums,
        num_members=num_averaged(model.predictor, count),
        prediction=model.predictor.prediction,
    )


def _nll_at_temperatures(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    return {"nll": found.nll_at_temperatures(labels)}
