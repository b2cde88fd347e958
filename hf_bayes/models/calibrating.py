"""A pass over held-out rows for the temperature of a model's mixture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_bayes.members.mesh import ChainMesh
from hf_bayes.metrics.calibration import NUM_GROUPS, Calibration, GroupSums, fit_calibration
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.prediction_state import PredictionState
from hf_bayes.models.predictors import Predictive
from hf_bayes.posteriors.posterior import Posterior


def reason_without_temperature(model: BayesianModel) -> str | None:
    """Return, in words, why no mixture of the model has a temperature; None if it can have one."""
    if model.likelihood.predicts_numbers:
        return "the labels are numbers"
    if not model.predicts_its_terms:
        return "the rows are preferences, whose temperature is not that of the tokens which the posterior predicts"
    return None


@contextmanager
def predicting_as_loaded(model: BayesianModel, posterior: Posterior) -> Iterator[None]:
    """Predict as a model that is loaded from the posterior does, until the end of the block."""
    before = PredictionState(model)
    try:
        model.posterior, model.calibrated = posterior, True
        model.predict_by(posterior.config.prediction)
        if model.is_closed_form:  # members of a run are no part of it
            model.show(None)
        yield
    finally:
        before.restore()


def calibration_by_number(
    model: BayesianModel,
    batches: Callable[[Sequence[int]], Iterable[dict[str, Any]]],
    rows: Sequence[int],
    mesh: ChainMesh,
) -> Calibration:
    """Return the temperature of ``calibration_of``, with the members and the rows divided among processes.

    Args:
        batches: numbers of held-out rows -> these rows, in this order, in batches.
        rows: the numbers of all rows to use.
        mesh: the processes; each has the members of its chains, and those that share chains divide the rows.
    """
    return calibration_of(
        model,
        batches(rows[mesh.data_rank :: mesh.data_size]),
        numbers=itertools.count(mesh.data_rank, mesh.data_size),
        add_up=lambda sums: sums.copy_(mesh.sum_over_data(sums.to(mesh.device))),
    )


def calibration_of(
    model: BayesianModel,
    batches: Iterable[dict[str, Any]],
    *,
    numbers: Iterator[int] | None = None,
    add_up: Callable[[Tensor], Any] = lambda sums: None,
) -> Calibration:
    """Return the temperature of the mixture of the model's current members.

    Args:
        batches: held-out rows with ``labels``.
        numbers: the number of each row, which decides on its group; None counts the rows.
        add_up: adds a tensor up over the processes that have other rows, in place.
    Raises:
        ValueError: for too few rows, labels that are numbers, or a mixture that has a temperature already.
    """
    sums = heldout_sums(model, batches, numbers=numbers)
    add_up(sums.curves)
    add_up(sums.terms)
    return fit_to(model, sums)


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


def fit_to(model: BayesianModel, sums: GroupSums) -> Calibration:
    """Return the temperature that fits the sums over rows, for the way in which the model predicts now."""
    return fit_calibration(sums, **model.predicted_by._asdict())


def _nll_at_temperatures(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    return {"nll": found.nll_at_temperatures(labels)}
