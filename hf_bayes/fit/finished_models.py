"""The parts that all fits to finished models share: the given model, its rows, and batches of rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.number_checks import is_count, is_finite_number
from hf_bayes.core.tensors import with_tensors
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.attaching import MODELS, attach, refuse_frozen_adapter
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.image_text import counting_images
from hf_bayes.models.language.packing import refuse_mixed_documents
from hf_bayes.models.loading.checkpoint_weights import warn_of_frozen_head
from hf_bayes.models.refusals import refuse_other_likelihood
from hf_bayes.models.to_posterior import refuse_unsavable
from hf_bayes.objectives.data_access import row_batches
from hf_bayes.objectives.data_rows import in_words, is_stream, require_dataset
from hf_bayes.objectives.label_columns import with_columns
from hf_bayes.objectives.likelihood_terms import labels_of
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.weighted import without_weights

NUM_CHECKED = 8
"""The rows on which a likelihood is checked."""


@contextmanager
def as_bayesian(
    model: Any, subspace: str, noise_std: float | None, likelihood: LikelihoodConfig | None = None, *,
    load: Callable[..., BayesianModel] | None = None,
) -> Iterator[BayesianModel]:  # fmt: skip
    """Yield the Bayesian model to fit. A model of transformers or peft is attached, and detached afterwards.

    Args:
        likelihood: the likelihood of a plain model. A BayesianModel and a saved posterior have one, which must be the
            same; given with a posterior, its class need not be registered.
        load: loads the model at a place, by default the posterior there, with the given likelihood as its
            ``likelihood=``.
    Raises:
        ValueError: for a ``noise_std`` or a likelihood beside a model that has its own.
    """
    if is_place(model):
        model = (load or load_posterior)(model, likelihood=likelihood)
    if isinstance(model, BayesianModel):
        if noise_std is not None:
            raise ValueError(
                f"noise_std={noise_std} is for a plain model: a BayesianModel and a saved posterior have one of their "
                f"own ({without_weights(model.likelihood).noise_std}). Leave it out"
            )
        refuse_other_likelihood(likelihood, model)
        yield model
        return
    bayesian = attach(model, subspace=subspace, noise_std=noise_std, likelihood=likelihood)
    try:
        yield bayesian
    finally:
        bayesian.detach()


@contextmanager
def model_to_fit(
    model: Any, subspace: str, noise_std: float | None, likelihood: LikelihoodConfig | None = None, *,
    method: MethodConfig, tokenizer: Any, load: Callable[..., BayesianModel] | None = None,
) -> Iterator[tuple[BayesianModel, str]]:  # fmt: skip
    """Yield the Bayesian model of ``as_bayesian`` and the name of its subspace, for a fit that returns a posterior.

    Args:
        method: the config of the fit.
        tokenizer: the tokenizer or processor that will be saved with the posterior, or None.
    Raises:
        ValueError: as ``as_bayesian``, and for a model that the posterior could not hold, such as one with a frozen
            adapter.
    """
    with as_bayesian(model, subspace, noise_std, likelihood, load=load) as bayesian:
        refuse_frozen_adapter(bayesian)
        if bayesian.posterior is not None:
            subspace = bayesian.posterior.config.subspace
        refuse_unsavable(bayesian, method, subspace=subspace, tokenizer=tokenizer)
        warn_of_frozen_head(bayesian.core, bayesian.layout)
        yield bayesian, subspace


def load_posterior(directory: str | os.PathLike[str], *, likelihood: LikelihoodConfig | None = None) -> BayesianModel:
    """Load the posterior in a directory or repository, to predict by its members."""
    # another task is refused where the file is read
    task = Posterior.from_pretrained(directory).config.task
    return MODELS[task].from_pretrained(directory, prediction="members", likelihood=likelihood)


def config_for(name: str, given: MethodConfig | None, **settings: Any) -> Any:
    """Return the config of a fit: the one that the user gave, or else one with these settings.

    Args:
        name: the name of the method of which the fit makes a posterior.
        given: the user's config; None for the default.
        settings: the fields of the default config.
    Raises:
        ValueError: for a config of another method.
    """
    kind = METHODS[name]
    if given is None:
        return kind(**settings)
    if not isinstance(given, kind):
        raise ValueError(
            f"method must be of the class {kind.__name__}, got {type(given).__name__}: other methods need a trainer"
        )
    return given


def require_rows_by_number(function: str, name: str, data: Any) -> None:
    """Raise unless ``data`` has rows that can be counted and asked for by number: passes are made over some of them.

    Args:
        function: the name of the function that takes the rows.
        name: the name of its argument.
    """
    if isinstance(data, DataLoader):
        raise ValueError(
            f"{name} is a DataLoader, and {function} makes batches of its own: give {name}=loader.dataset and, unless "
            "it is the default one, collate=loader.collate_fn"
        )
    if is_stream(data) or isinstance(data, Mapping) or not hasattr(data, "__getitem__"):
        raise ValueError(
            f"{name} must have rows that can be counted and asked for by number, got {type(data).__name__}: give a "
            "list of rows or a data set with a length (of a DatasetDict one split)"
        )
    require_dataset(data, name, f"{function} needs some")


def check_rows_and_batch_size(function: str, name: str, data: Any, batch_size: Any) -> None:
    """Check rows, as ``require_rows_by_number`` does, and the size of their batches, before a model is loaded."""
    if not is_count(batch_size):
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    require_rows_by_number(function, name, data)


def check_sizes(batch_size: Any, num_data: Any, data_unit: Any) -> None:
    """Check the size of a batch, N and its unit, before a model is loaded."""
    if not is_count(batch_size):
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    if num_data is not None and not (is_finite_number(num_data) and num_data > 0):
        raise ValueError(f"num_data must be finite and > 0, got {num_data!r}")
    if data_unit not in ("token", "sequence"):
        raise ValueError(f"data_unit must be one of token, sequence, got {data_unit!r}")


def check_first_rows(model: BayesianModel, data: Any, collate: Callable[..., Any]) -> None:
    """Check, on the first rows, that the model gives them a likelihood.

    Raises:
        ValueError: if a user's likelihood is no finite sum over likelihood terms, or the model mixes packed documents.
    """

    def first(count: int) -> dict[str, Any]:
        rows = range(min(count, len(data)))
        return next(batches_by_number(data, rows, model=model, collate=collate, batch_size=count))

    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a collator may be random
        if model.likelihood.has_check:
            model.each_term(first(NUM_CHECKED), model.likelihood.check)
        if model.term_kind == "token":
            refuse_mixed_documents(model, model.theta.detach()[:2], first(2))  # a collator may pack rows together


def labelled_batches(
    data: Any, *, model: BayesianModel, collate: Callable[..., Any] | None, batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yield all rows in batches with ``labels``, which carry the columns that the model's likelihood reads.

    Args:
        data: rows that ``require_rows_by_number`` accepts.
        collate: rows -> a batch; None is transformers' default collator.
    Raises:
        ValueError: for a batch without labels, or without a column of the likelihood.
    """
    collate = with_columns(model.likelihood, collate or default_data_collator)
    for batch in batches_by_number(data, range(len(data)), model=model, collate=collate, batch_size=batch_size):
        labels_of(batch)
        yield batch


def batches_by_number(
    data: Any, rows: Sequence[int], *, model: BayesianModel, collate: Callable[..., Any], batch_size: int,
    progress: str | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Return these rows, in this order, in batches on the device of the model; arguments as of ``row_batches``."""

    def to_device(batch: dict[str, Any]) -> dict[str, Any]:
        return with_tensors(batch, lambda tensor: tensor.to(model.device))

    collate = counting_images(model, in_words(collate, "the data"))
    return row_batches(data, rows, collate=collate, batch_size=batch_size, prepare=to_device, progress=progress)
