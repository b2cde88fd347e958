"""``fit_calibration``: a posterior -> the same posterior with a temperature of its mixture, by held-out rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hf_bayes.fit.finished_models import check_rows_and_batch_size, labelled_batches
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.calibrating import calibration_of
from hf_bayes.models.loading.posterior import read
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_temperature


def fit_calibration(
    posterior: Posterior | str | os.PathLike[str],
    heldout: Any,
    *,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    base_model: Any = None,
    prediction: str | None = None,
    members: int | None = None,
) -> Posterior:
    """Return the posterior with a temperature of its mixture, fitted on held-out rows (``metrics.calibration``).

    Loading it applies the temperature. ``save_pretrained`` stores it. The stored factors of a single pass are
    applied during the fit. A threshold (``fit_abstention``) that was fitted at another temperature is left out.

    Args:
        posterior: a posterior, its directory or its repository on the Hub.
        heldout: rows with labels that were not used in training: a list, or a data set with a length.
        collate: rows -> a batch of tensors with ``labels``; None is transformers' default collator.
        batch_size: rows of a forward pass; the result does not depend on it.
        base_model, prediction, members: as in ``from_pretrained``. A temperature belongs to one way of prediction and
            one number of members, and replaces an earlier one.
    Raises:
        ValueError: for too few rows, or a model whose labels are numbers.
    """
    check_rows_and_batch_size("fit_calibration", "heldout", heldout, batch_size)
    loaded = read(posterior)
    kind = MODELS[loaded.config.task]
    with kind.from_pretrained(
        loaded, base_model=base_model, prediction=prediction, members=members, calibrated=False
    ) as model:
        batches = labelled_batches(heldout, model=model, collate=collate, batch_size=batch_size)
        found = calibration_of(model, batches)
    return with_temperature(loaded, found.to_dict())
