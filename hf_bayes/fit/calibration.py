"""``fit_calibration``: a posterior -> the same posterior with a temperature of its mixture, by held-out rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_bayes.core.number_checks import is_count
from hf_bayes.core.tensors import with_tensors
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.calibrating import calibration_of
from hf_bayes.models.loading import read
from hf_bayes.objectives.data_rows import in_words
from hf_bayes.posteriors.posterior import Posterior


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

    Loading it applies the temperature. ``save_pretrained`` stores it.

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
    if not is_count(batch_size):
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    loaded = read(posterior)
    kind = MODELS[loaded.config.task]
    with kind.from_pretrained(
        loaded, base_model=base_model, prediction=prediction, members=members, calibrated=False
    ) as model:
        batches = batches_of(heldout, collate, batch_size, model.device)
        found = calibration_of(model, batches)
    config = dataclasses.replace(loaded.config, calibration=found.to_dict())
    return dataclasses.replace(loaded, config=config)


def batches_of(rows: Any, collate: Callable[..., Any] | None, batch_size: int, device: Any) -> Iterable[dict[str, Any]]:
    """Yield batches of rows on a device; without ``collate`` by transformers' default collator."""
    collate = in_words(collate or default_data_collator, "the data")
    for batch in DataLoader(rows, batch_size=batch_size, collate_fn=collate):
        yield with_tensors(batch, lambda tensor: tensor.to(device))
