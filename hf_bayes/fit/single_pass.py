"""Calibration factors of a single pass: one for all layers by held-out rows, or one for each layer by members.

A single pass drops covariances, so that its variances are off by a factor that depends on the layer.
``fit_variance_factor`` multiplies all variances by one factor, which minimises the negative log predictive density of
held-out labels (section 3 of the paper, see ``models.single_pass.weight_laws``). ``fit_layer_factors`` compares the
epistemic uncertainty with the epistemic uncertainty of members.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, minimize_scalar

from hf_bayes.fit.calibration import batches_of
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.loading import read
from hf_bayes.posteriors.posterior import Posterior

LARGEST = 1e3
"""The largest factor, and the inverse of the smallest."""

PULL = 0.1
"""The weight of (log factor)^2 beside the mean squared error of log EU: layers that the rows do not tell apart stay
near each other, and near 1."""


def fit_variance_factor(posterior: Posterior | str | os.PathLike[str], heldout: Any, **options: Any) -> Posterior:
    """Return the posterior with one factor of all variances of a single pass, by the NLPD of held-out rows.

    Args:
        posterior: a Gaussian posterior, its directory or its repository on the Hub.
        heldout: rows with labels that were not used in training.
        options: ``collate``, ``batch_size`` and ``base_model``, as of ``fit_calibration``.
    Raises:
        ValueError: as ``BayesianModel.single_pass``.
    """
    loaded, model, batches = _opened(posterior, heldout, **options)
    with model:
        model.single_pass()
        paths = model.predictor.paths

        def nlpd(log_factor: float) -> float:
            model.predictor.set_factors(dict.fromkeys(paths, float(np.exp(log_factor))))
            return float(_statistic(model, batches, "nll").mean())

        bounds = (-np.log(LARGEST), np.log(LARGEST))
        with model.predictor.reusing_passes([paths]):
            found = minimize_scalar(nlpd, bounds=bounds, method="bounded", options={"xatol": 0.02})
    return _with_factors(loaded, dict.fromkeys(paths, float(np.exp(found.x))))


def fit_layer_factors(
    posterior: Posterior | str | os.PathLike[str], rows: Any, *, members: int = 32, **options: Any
) -> Posterior:
    """Return the posterior with a factor for each random layer, by the epistemic uncertainty of members.

    The factors minimise the mean squared difference of the logarithms of the two uncertainties.

    Args:
        posterior: a Gaussian posterior, its directory or its repository on the Hub.
        rows: rows with labels, which only mark the terms that count.
        members: the number of members to compare with; they are drawn from the posterior.
        options: ``collate``, ``batch_size`` and ``base_model``, as of ``fit_calibration``.
    Raises:
        ValueError: as ``BayesianModel.single_pass``.
    """
    loaded, model, batches = _opened(posterior, rows, members=members, **options)
    with model:
        target = _epistemic(model, batches)
        model.single_pass()
        paths = model.predictor.paths

        def residuals(shifted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            log_factors = shifted - 1  # scipy's finite differences are relative, and log 1 is 0
            model.predictor.set_factors(dict(zip(paths, np.exp(log_factors).tolist(), strict=True)))
            error = (_epistemic(model, batches) / target).log().numpy() / np.sqrt(len(target))
            return np.concatenate([error, PULL * log_factors])

        limit = np.log(LARGEST)
        bounds = (1 - limit, 1 + limit)
        with model.predictor.reusing_passes([[path] for path in paths]):
            found = least_squares(residuals, np.ones(len(paths)), bounds=bounds, diff_step=0.05, max_nfev=8)
    return _with_factors(loaded, dict(zip(paths, np.exp(found.x - 1).tolist(), strict=True)))


def _opened(
    posterior: Posterior | str | os.PathLike[str],
    rows: Any,
    *,
    members: int | None = None,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    base_model: Any = None,
) -> tuple[Posterior, Any, list[dict[str, Any]]]:
    """Return the posterior, its model by members, and the batches."""
    loaded = read(posterior)
    kind = MODELS[loaded.config.task]
    model = kind.from_pretrained(loaded, base_model=base_model, prediction="members", members=members, calibrated=False)
    return loaded, model, list(batches_of(rows, collate, batch_size, model.device))


def _with_factors(posterior: Posterior, factors: Mapping[str, float]) -> Posterior:
    config = dataclasses.replace(posterior.config, layer_factors=dict(factors))
    return dataclasses.replace(posterior, config=config)


def _epistemic(model: Any, batches: Iterable[dict[str, Any]]) -> torch.Tensor:
    """Return the epistemic uncertainty, or standard deviation, of each likelihood term."""
    found = [model.evaluate_batch(dict(batch))[0] for batch in batches]
    name = "epistemic" if "epistemic" in found[0] else "epistemic_std"
    values = torch.cat([statistics[name] for statistics in found]).double().cpu()
    return values.clamp_min(torch.finfo(torch.float32).tiny)


def _statistic(model: Any, batches: Iterable[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.cat([model.evaluate_batch(dict(batch))[0][name] for batch in batches])
