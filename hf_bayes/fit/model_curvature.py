"""Fisher, empirical Fisher, GGN and Hessian of a transformers or peft model on rows of data, and gradients of its rows.

The estimators, hooks and likelihoods are those of ``fit_laplace``, so LoRA, embeddings, norms and tied weights are
supported, and H is the same matrix that ``LaplaceConfig(structure="full")`` forms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_bayes.core.number_checks import is_count
from hf_bayes.fit.curvature_operator import CurvatureOperator
from hf_bayes.fit.finished_models import as_bayesian, batches_by_number, require_rows_by_number
from hf_bayes.methods.laplace.estimators import build_estimator
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.curvature_pass import PassData, run_curvature_pass
from hf_bayes.objectives.curvature_streams import curvature_products, row_gradients
from hf_bayes.objectives.label_columns import with_columns
from hf_bayes.uncertainty.custom.base import LikelihoodConfig

AnyModel = PreTrainedModel | PeftModel | BayesianModel


def curvature_of_model(
    model: AnyModel,
    data: Any,
    *,
    estimator: str = "ggn",
    num_samples: int | None = 1,
    collate: Callable[..., Any] = default_data_collator,
    batch_size: int = 8,
    subspace: str = "trainable",
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
    seed: int = 0,
) -> CurvatureOperator:
    """Return the curvature of -log p(D | theta) of a model, as an operator: its products, matrix and linear systems.

    The model is left as it was, and may change between two products: each is computed at the weights given now.

    Args:
        model: a transformers or peft model, or a ``BayesianModel`` (then at its first member).
        data: rows by number, with labels, as ``fit_laplace`` takes them.
        estimator: "ggn", which is the Fisher matrix; "ef_sequence" or "ef_token", the empirical Fisher of rows and of
            terms; or "hessian", which is formed once, for at most 2048 parameters.
        num_samples: number of label draws ("ggn") or random signs ("ef_token") per row; None is exact.
        collate: rows -> a batch of tensors with ``labels``.
        batch_size: rows of a forward. Gradients of so many rows [B, d] are held.
        subspace: the name of the parameters that are random, see ``hf_bayes.core.layout.select``; a BayesianModel has
            its own.
        noise_std: the standard deviation of a regression's noise, in units of the labels; other heads refuse it.
        likelihood: the likelihood of the labels (docs/likelihoods.md); None takes the head's own.
        seed: the seed of the draws, which are the same in every product.
    Raises:
        ValueError: for an unknown estimator, or for data without a number of rows.
    """
    CurvatureSpec(estimator=estimator, num_samples=num_samples).check()
    make = _passes(model, data, collate, batch_size, subspace, noise_std, likelihood, seed)
    with make() as (bayesian, theta, _):
        layout = bayesian.layout
        CurvatureSpec(estimator=estimator, num_samples=num_samples).check_size(layout.dim)

    @functools.cache
    def hessian() -> Tensor:
        with make() as (bayesian, theta, rows):
            spec = CurvatureSpec(estimator="hessian", structure="full")
            found = run_curvature_pass(bayesian, theta, rows.batches, rows.num_rows, spec, gradient=False, seed=seed)
            return found.curvature.dense().to(theta)

    def products(vectors: Tensor) -> Tensor:
        if estimator == "hessian":
            return vectors @ hessian()
        with make() as (bayesian, theta, rows):
            return curvature_products(bayesian, theta, rows, build_estimator(estimator, num_samples), vectors)

    return CurvatureOperator(products, layout, theta)


def row_gradients_of_model(
    model: AnyModel,
    data: Any,
    *,
    collate: Callable[..., Any] = default_data_collator,
    batch_size: int = 8,
    subspace: str = "trainable",
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
) -> Iterator[Tensor]:
    """Yield the gradient of each row's log-likelihood, [B, d] for ``batch_size`` rows at a time, in order.

    Never are those of all rows held together. Dropout is off. The columns are those of
    ``hf_bayes.core.layout.select(model, subspace)``. The arguments are those of ``curvature_of_model``.
    """
    make = _passes(model, data, collate, batch_size, subspace, noise_std, likelihood, seed=0)

    def found() -> Iterator[Tensor]:
        for numbers in torch.arange(len(data)).split(batch_size):
            with make() as (bayesian, theta, rows):  # a caller may stop early: the model is its own between batches
                gradients = row_gradients(bayesian, theta, rows, numbers.tolist())
            yield gradients

    return found()


def _passes(
    model: AnyModel, data: Any, collate: Callable[..., Any], batch_size: int, subspace: str, noise_std: float | None,
    likelihood: LikelihoodConfig | None, seed: int,
) -> Callable[[], Any]:  # fmt: skip
    """Return a function that opens a model for a pass over its data: (Bayesian model, theta [d], data)."""
    require_rows_by_number("this function", "data", data)
    if not is_count(batch_size):
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")

    @contextmanager
    def opened() -> Iterator[tuple[BayesianModel, Tensor, PassData]]:
        with as_bayesian(model, subspace, noise_std, likelihood) as bayesian:
            collator = with_columns(bayesian.likelihood, collate)
            batches = functools.partial(
                batches_by_number, data, model=bayesian, collate=collator, batch_size=batch_size
            )  # fmt: skip
            rows = PassData(batches, len(data), 1.0, seed, None, nullcontext)
            yield bayesian, bayesian.current[0].detach(), rows

    return opened
