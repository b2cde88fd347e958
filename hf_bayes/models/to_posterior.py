"""Turn an approximation over the parameters of a live model into a ``Posterior`` that can be saved."""

from __future__ import annotations

from typing import Any, cast

import torch

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.core.types import Approximation
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.distributions.priors import prior_stds
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading import base_model
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.storage.json_values import json_value
from hf_bayes.uncertainty.custom.weighted import without_weights


def to_posterior(
    model: BayesianModel,
    approximation: Approximation,
    method: MethodConfig,
    *,
    subspace: str,
    num_data: float | None,
    data_unit: str,
    tokenizer: Any,
    seed: int,
    diagnostics: dict[str, Any],
    prior: dict[str, Any] | None = None,
    trace: dict[str, Any] | None = None,
    sidecars: Sidecars | None = None,
) -> Posterior:
    """Return the posterior of a method over the random parameters of ``model``, complete for saving.

    Args:
        tokenizer: the tokenizer or processor that is saved with it; None keeps the tokenizer of the posterior that
            ``model`` was loaded from.
        sidecars: the files of the tokenizer or processor, if they have been collected already.
    Raises:
        ValueError: if a posterior cannot hold the model's adapter, head or name. ``refuse_unsavable`` raises this error
            before anything is computed.
    """
    layout = model.members.layout_of(cast(Draws | Gaussian, approximation).rows)
    description = base_model.describe(model.model, model.core, layout, tokenizer)
    if tokenizer is None and model.posterior is not None:
        description["fingerprint"]["tokenizer"] = model.posterior.config.base_model["fingerprint"]["tokenizer"]
    noise_std, own = without_weights(model.likelihood).noise_std, model.likelihood.config
    stored = {} if own is None else {own.stored_as: own.to_dict()}
    head = base_model.describe_head(model.core, noise_std)
    base_model.check_head(json_value(head, "head"), model.core.config, layout)  # as loading does
    return Posterior(
        approximation=approximation,  # type: ignore[arg-type]
        adapter_config=base_model.adapter_config(model.model),
        trace=trace,
        sidecars=sidecars_of(model, tokenizer) if sidecars is None else sidecars,
        config=PosteriorConfig(
            task=model.task,
            method=method.to_dict(),
            approximation=approximation.kind,
            parameters=[[name, list(shape)] for name, shape in layout.named_shapes.items()],
            num_members=approximation.num_stored,
            subspace=subspace,
            prior=prior
            or _fitted_prior(method, layout, diagnostics)
            or {
                "name": method.prior,
                "std": prior_stds(method, model.layout, model.model),
                "mean": method.prior_mean,
            },
            num_data=num_data,
            data_unit=data_unit,
            base_model=description,
            head=head | stored,
            prediction="linearised" if method.requirements.predicts_linearised and model.linearises else "members",
            seed=seed,
            diagnostics=diagnostics,
        ),
    )


def refuse_unsavable(
    model: BayesianModel, method: MethodConfig, *, subspace: str, tokenizer: Any, sidecars: Sidecars | None = None
) -> None:
    """Raise for a model that no posterior can hold, before anything is computed.

    A posterior is made once, with a placeholder for the approximation. So there is no second list of the conditions.

    Args:
        method, subspace, tokenizer, sidecars: as of ``to_posterior``.
    Raises:
        ValueError: as ``to_posterior``.
    """
    zeros = torch.zeros(()).expand(1, model.layout.dim)  # takes no memory
    placeholder: Approximation = Gaussian.diagonal(zeros, zeros)  # draws would be copied and hashed
    if not method.requirements.ends_in_gaussian and set(model.members.statistics.names) & set(model.layout.names):
        placeholder = Draws.from_chains(zeros[None])  # no Gaussian holds statistics
    to_posterior(
        model, placeholder, method,
        subspace=subspace, num_data=None, data_unit="token", tokenizer=tokenizer, seed=0, diagnostics={},
        sidecars=sidecars,
    )  # fmt: skip


def _fitted_prior(method: MethodConfig, layout: Layout, diagnostics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the prior that ``fit_prior`` found, or None without one.

    The std is one number, or {name: std}. A std for each element is recorded as its smallest, median and largest value.
    Several chains have a list of these.
    """
    notes = [note for note in diagnostics.get(method.name) or () if isinstance(note, dict)]
    found = [note["prior_precision"] for note in notes if "prior_precision" in note]
    if not found:
        return None
    scope = method.to_dict().get("prior_scope")
    names = ("largest", "median", "smallest") if scope == "element" else layout.names  # of precisions, which ascend
    stds = [
        dict(zip(names, map(_std, given), strict=True)) if isinstance(given, list) else _std(given) for given in found
    ]
    # the fitted std is the std itself, so a prior "he" has no further factor
    return {
        "name": "gaussian" if method.prior == "he" else method.prior,
        "std": stds[0] if len(stds) == 1 else stds,
        "mean": method.prior_mean,
        "fitted_by": method.to_dict().get("fit_prior"),
        "scope": scope,
    }


def _std(precision: float) -> float | None:
    """Return the standard deviation, or None for a flat prior."""
    return precision**-0.5 if precision > 0 else None


def sidecars_of(model: BayesianModel, tokenizer: Any, known: Sidecars | None = None) -> Sidecars:
    """Return the files of a tokenizer or processor, and of the generation config if the model has one.

    Args:
        tokenizer: None keeps the ``known`` files, or the files of the posterior that ``model`` was loaded from.
    """
    if tokenizer is None and known is None and model.posterior is not None:
        known = model.posterior.sidecars
    return (known or Sidecars()) | Sidecars.of(tokenizer, getattr(model, "generation_config", None))
