"""Calibration factors of a single pass: one for all layers by held-out rows, or one for each layer by members.

A single pass drops covariances, so that its variances are off by a factor that depends on the layer.
``fit_variance_factor`` multiplies all variances by one factor, which minimises the negative log predictive density of
held-out labels (section 3 of the paper, see ``models.single_pass.weight_laws``). ``fit_layer_factors`` compares the
epistemic uncertainty with the epistemic uncertainty of members.

The factors belong to the single pass itself, also while a temperature is fitted to it. So new factors leave out a
temperature, a student and a threshold that were fitted to the single pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, minimize_scalar

from hf_bayes.fit.finished_models import check_rows_and_batch_size, labelled_batches
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.loading.posterior import read
from hf_bayes.objectives.likelihood_terms import all_ignored
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_layer_factors, without_fits
from hf_bayes.uncertainty.gaussian_links import SINGLE_PASS

LARGEST = 1e3
"""The largest factor, and the inverse of the smallest."""

SHRINKAGE = 0.1
"""The weight of (log factor)^2 beside the mean squared error of log EU: layers that the rows do not tell apart stay
near each other, and near 1."""


def fit_variance_factor(posterior: Posterior | str | os.PathLike[str], heldout: Any, **options: Any) -> Posterior:
    """Return the posterior with one factor of all variances of a single pass, by the NLPD of held-out rows.

    Args:
        posterior: a Gaussian posterior, its directory or its repository on the Hub.
        heldout: rows with labels that were not used in training.
        options: ``collate``, ``batch_size`` and ``base_model``, as of ``fit_calibration``.
    Raises:
        ValueError: as ``BayesianModel.single_pass``, and for rows without labels.
    """
    with _opened("fit_variance_factor", "heldout", posterior, heldout, **options) as (plain, model, batches):
        model.single_pass()
        paths = model.predictor.paths

        def nlpd(log_factor: float) -> float:
            model.predictor.set_factors(dict.fromkeys(paths, float(np.exp(log_factor))))
            return float(_statistic(model, batches, "nll").mean())

        bounds = (-np.log(LARGEST), np.log(LARGEST))
        with model.predictor.reusing_passes([paths]):
            found = minimize_scalar(nlpd, bounds=bounds, method="bounded", options={"xatol": 0.02})
    return with_layer_factors(plain, dict.fromkeys(paths, float(np.exp(found.x))))


def fit_layer_factors(
    posterior: Posterior | str | os.PathLike[str], rows: Any, *, members: int = 32, **options: Any
) -> Posterior:
    """Return the posterior with a factor for each random layer, by the epistemic uncertainty of members.

    The factors minimise the mean squared difference of the logarithms of the two uncertainties.

    Args:
        posterior: a Gaussian posterior, its directory or its repository on the Hub.
        rows: rows with labels, which only mark the terms that count.
        members: the number of members to compare with, at least 2; they are drawn from the posterior.
        options: ``collate``, ``batch_size`` and ``base_model``, as of ``fit_calibration``.
    Raises:
        ValueError: as ``BayesianModel.single_pass``, for rows without labels, and for one member.
    """
    if members == 1:
        raise ValueError(
            "fit_layer_factors compares with the epistemic uncertainty of members, which is 0 for 1 member: give "
            "members=2 or more (the default is 32)"
        )
    with _opened("fit_layer_factors", "rows", posterior, rows, members=members, **options) as (plain, model, batches):
        target = _epistemic(model, batches)
        model.single_pass()
        paths = model.predictor.paths

        def residuals(shifted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            log_factors = shifted - 1  # scipy's finite differences are relative, and log 1 is 0
            model.predictor.set_factors(dict(zip(paths, np.exp(log_factors).tolist(), strict=True)))
            error = (_epistemic(model, batches) / target).log().numpy() / np.sqrt(len(target))
            return np.concatenate([error, SHRINKAGE * log_factors])

        limit = np.log(LARGEST)
        bounds = (1 - limit, 1 + limit)
        with model.predictor.reusing_passes([[path] for path in paths]):
            found = least_squares(residuals, np.ones(len(paths)), bounds=bounds, diff_step=0.05, max_nfev=8)
    return with_layer_factors(plain, dict(zip(paths, np.exp(found.x - 1).tolist(), strict=True)))


@contextmanager
def _opened(
    function: str,
    name: str,
    posterior: Posterior | str | os.PathLike[str],
    rows: Any,
    *,
    members: int | None = None,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    base_model: Any = None,
) -> Iterator[tuple[Posterior, Any, list[dict[str, Any]]]]:
    """Yield the posterior without fits to its single pass, its model by members, and the batches.

    Args:
        function, name: the names of the function that takes the rows, and of its argument.
    """
    check_rows_and_batch_size(function, name, rows, batch_size)
    plain = without_fits(read(posterior), (SINGLE_PASS,))
    with MODELS[plain.config.task].from_pretrained(
        plain, base_model=base_model, prediction="members", members=members, calibrated=False
    ) as model:
        batches = list(labelled_batches(rows, model=model, collate=collate, batch_size=batch_size))
        if not any(bool(model.terms_per_row(batch).any()) for batch in batches):
            reason = all_ignored(shift=model.term_kind == "token")
            raise ValueError(f"no row of {name} has a likelihood term ({reason}): check labels")
        yield plain, model, batches


def _epistemic(model: Any, batches: Iterable[dict[str, Any]]) -> torch.Tensor:
    """Return the epistemic uncertainty, or standard deviation, of each likelihood term."""
    found = [model.evaluate_batch(dict(batch))[0] for batch in batches]
    name = "epistemic" if "epistemic" in found[0] else "epistemic_std"
    values = torch.cat([statistics[name] for statistics in found]).double().cpu()
    return values.clamp_min(torch.finfo(torch.float32).tiny)


def _statistic(model: Any, batches: Iterable[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.cat([model.evaluate_batch(dict(batch))[0][name] for batch in batches])
