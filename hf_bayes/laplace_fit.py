"""``fit_laplace``: a model that is trained already -> a posterior, in one pass over the data."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, default_data_collator

from hf_bayes.artifact import Posterior
from hf_bayes.attaching import attach
from hf_bayes.batches import count_terms
from hf_bayes.causal_lm import BayesianModelForCausalLM
from hf_bayes.classification import (
    BayesianModelForImageClassification,
    BayesianModelForSequenceClassification,
    BayesianModelForTokenClassification,
)
from hf_bayes.config import MethodConfig
from hf_bayes.distributed import ChainMesh
from hf_bayes.inheritance import Inherited, inherit
from hf_bayes.laplace.evidence import fit_noise as fit_noise_of
from hf_bayes.likelihood import Categorical, Normal
from hf_bayes.methods import METHODS
from hf_bayes.model import BayesianModel
from hf_bayes.posterior import Gaussian
from hf_bayes.priors import build_prior
from hf_bayes.refusals import is_stream, refuse_frozen_adapter
from hf_bayes.rng import generator
from hf_bayes.saving import to_posterior
from hf_bayes.survey import Survey, survey
from hf_bayes.types import Look, Problem

MODELS: Mapping[str, type[BayesianModel]] = {
    kind.task: kind
    for kind in (
        BayesianModelForCausalLM,
        BayesianModelForSequenceClassification,
        BayesianModelForTokenClassification,
        BayesianModelForImageClassification,
    )
}
"""Task of a posterior's directory -> what loads it."""

NUM_MEMBERS = 10
"""Draws that a candidate prior is judged by."""


def fit_laplace(
    model: PreTrainedModel | PeftModel | BayesianModel | str | os.PathLike[str],
    data: Any,
    method: MethodConfig | None = None,
    *,
    collate: Callable | None = None,
    batch_size: int = 8,
    num_data: float | None = None,
    data_unit: str = "token",
    subspace: str = "trainable",
    prior: Posterior | str | os.PathLike[str] | None = None,
    noise_std: float | None = None,
    fit_noise: bool = False,
    tokenizer: Any = None,
    heldout: Any = None,
    prior_stds: Sequence[float] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    seed: int = 0,
) -> Posterior:
    """The Laplace approximation around weights that are there: of a finished adapter, or of each draw of a posterior.

    Of several processes (``torchrun``) all must call it: they share the rows, and each returns the whole.

    The model is given back as it was. Its weights should maximise the posterior under the method's prior; how far they
    are from that is measured, stored, and warned of.

    Args:
        model: a transformers or peft model; or a ``BayesianModel``, or the directory of a posterior, around each of
            whose members there will be a Gaussian: a mixture.
        data: rows by number, for ``collate``, with labels; no DataLoader, no stream. What the weights were trained on.
        method: ``LaplaceConfig(...)``; None is the default one.
        collate: rows -> a batch of tensors with ``labels``; None is transformers' default collator.
        batch_size: rows of a forward; the result does not depend on it.
        num_data: N, if it is not the number of likelihood terms in the data.
        data_unit: "token", or "sequence": N counts rows.
        subspace: see ``subspace.select``; of a BayesianModel it is known.
        prior: a posterior, its directory or Hub id, in place of ``prior_std`` (``hf_bayes.inheritance``).
        noise_std: of a regression head.
        fit_noise: replace it by the one with the largest evidence, the weights held fixed (``evidence.fit_noise``).
        tokenizer: whose fingerprint the posterior stores.
        heldout: rows like ``data``: choose ``prior_std`` among ``prior_stds`` by their negative log-likelihood under
            draws from the Gaussian: one for the model; for each tensor (``prior_scope="tensor"``) or each expression of
            a mapping, one after the other until no other choice of one of them is better. Not together with
            ``fit_prior`` or ``prior``.
        prior_stds: candidates; a warning says if the best is the least or the greatest.
        seed: of labels drawn for the GGN, of draws that judge a candidate.
    Raises:
        ValueError: before the pass, for a model, data or method that it cannot be made of; after it, if H + tau is
            not positive definite.
    """
    config: Any = METHODS["laplace"]() if method is None else method
    if config.name != "laplace":
        raise ValueError(f"method must be a LaplaceConfig, got {type(config).__name__}: other methods need a trainer")
    if heldout is not None:
        _refuse_to_choose(config, prior, prior_stds)
    if fit_noise:
        _refuse_to_fit_noise(config, heldout, prior)
    for name, given in (("data", data), ("heldout", heldout)):
        if given is not None or name == "data":
            _require_rows(name, given)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    for name, value in (("num_data", num_data), *(("prior_stds", std) for std in prior_stds)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    if data_unit not in ("token", "sequence"):
        raise ValueError(f"data_unit must be one of token, sequence, got {data_unit!r}")
    if isinstance(model, (str, os.PathLike)):
        model = _load(model)
    owned = not isinstance(model, BayesianModel)
    bayesian = (
        model
        if isinstance(model, BayesianModel)
        else attach(model, subspace=subspace, noise_std=noise_std or (1.0 if fit_noise else None))
    )
    if not owned and bayesian.posterior is not None:
        subspace = bayesian.posterior.config.subspace
    try:
        refuse_frozen_adapter(bayesian)
        if fit_noise and not isinstance(bayesian.likelihood, Normal):
            raise ValueError(
                f"fit_noise=True is for regressions: the likelihood of {type(bayesian.core).__name__} is "
                f"{type(bayesian.likelihood).__name__} and has no noise_std. Leave it out"
            )
        inherited = None if prior is None else inherit(prior, bayesian, config, data_unit=data_unit)
        if inherited is not None:
            inherited.check_tokenizer(tokenizer)
        return _fit(
            bayesian, data, config, collate or default_data_collator, batch_size, num_data, data_unit, subspace,
            tokenizer, heldout, prior_stds, seed, inherited, fit_noise,
        )  # fmt: skip
    finally:
        if owned:
            bayesian.detach()


def _fit(
    model: BayesianModel, data: Any, config: Any, collate: Callable, batch_size: int, num_data: float | None,
    data_unit: str, subspace: str, tokenizer: Any, heldout: Any, prior_stds: Sequence[float], seed: int,
    inherited: Inherited | None, fit_noise: bool,
) -> Posterior:  # fmt: skip
    count = functools.partial(
        count_terms,
        collate=collate,
        likelihood=model.likelihood,
        shift=model.shifts_labels,
        num_classes=_num_classes(model),
        progress=False,
    )
    config.spec.check_size(model.layout.dim, None, None)  # before rows are counted
    terms, most = count(data, name="data")
    config.spec.check_size(model.layout.dim, most, model.num_root_columns)
    if heldout is not None:
        count(heldout, name="heldout")
    total = float(num_data or (len(data) if data_unit == "sequence" else terms))
    theta = model.current.detach().cpu()
    run = functools.partial(_batches, model=model, collate=collate, batch_size=batch_size)
    mesh = ChainMesh(1, torch.device(model.device))
    seen: dict[bytes, Survey] = {}

    def look(theta: Tensor, what: Any, *, gradient: bool) -> Survey:
        key = theta.numpy().tobytes()
        if key not in seen:  # candidate priors share one pass
            options: dict[str, Any] = {"scale": total / terms, "gradient": gradient, "seed": seed, "mesh": mesh}
            rows = functools.partial(run, data)
            seen[key] = survey(model, theta.to(model.device), rows, len(data), what, **options)
        return seen[key]

    report: dict[str, Any] = {}
    if heldout is not None:
        config, report["heldout_nll"] = _by_heldout(model, theta, config, look, total, run, heldout, prior_stds, seed)
    problem = _problem(model, theta, config, total, inherited)
    likelihood = model.likelihood
    if fit_noise:
        look = _with_fitted_noise(model, theta, config, look, problem)
    try:
        approximation, notes = config.revise(theta, look, problem)
        verdict = f"a Gaussian around {len(theta)} given points: not assessed"
        return to_posterior(
            model, approximation, config, subspace=subspace, num_data=total, data_unit=data_unit, tokenizer=tokenizer,
            seed=seed, diagnostics={"converged": None, "verdict": verdict, **notes, **report},
            prior=None if inherited is None else inherited.record,
        )  # fmt: skip
    finally:
        model.likelihood = likelihood


def _require_rows(name: str, data: Any) -> None:
    """Raise unless ``data`` has rows that can be counted and asked for by number: passes are made over some of them."""
    if isinstance(data, DataLoader):
        raise ValueError(
            f"{name} is a DataLoader, and fit_laplace makes batches of its own: give {name}=loader.dataset and, unless "
            "it is the default one, collate=loader.collate_fn"
        )
    if is_stream(data) or isinstance(data, Mapping) or not hasattr(data, "__getitem__"):
        raise ValueError(
            f"{name} must have rows that can be counted and asked for by number, got {type(data).__name__}: give a "
            "list of rows or a data set with a length (of a DatasetDict one split)"
        )


def _refuse_to_choose(config: Any, prior: Any, prior_stds: Sequence[float]) -> None:
    if config.fit_prior is not None or prior is not None:
        other = "prior=" if prior is not None else f"fit_prior={config.fit_prior!r}"
        raise ValueError(f"heldout= and {other} both choose the prior: leave one out")
    if config.prior_scope == "element":
        raise ValueError(
            "heldout= with prior_scope='element' would choose a number for each weight by the same few rows: use "
            "prior_scope 'model' or 'tensor', or fit_prior='evidence'"
        )
    if len(prior_stds) == 0:
        raise ValueError("prior_stds is empty, and heldout= chooses among them: give candidates, or leave heldout out")


def _refuse_to_fit_noise(config: Any, heldout: Any, prior: Any) -> None:
    if heldout is not None or prior is not None:
        other = "prior=" if prior is not None else "heldout="
        raise ValueError(f"fit_noise=True and {other} do not go together: give noise_std, or leave {other} out")
    if config.temperature != 1 or config.strength != 1:
        raise ValueError(
            f"fit_noise=True needs temperature=1 and strength=1, got {config.temperature:g} and {config.strength:g}: "
            "there is no evidence of a tempered likelihood, or of data that count several times"
        )
    if config.estimator not in ("ggn", "hessian"):
        raise ValueError(
            f"fit_noise=True needs estimator='ggn' or 'hessian', got {config.estimator!r}: it follows the curvature as "
            "1 / noise_std^2, and an empirical Fisher goes with residuals / noise_std^4"
        )


def _with_fitted_noise(model: BayesianModel, theta: Tensor, config: Any, look: Look, problem: Problem) -> Look:
    """``look`` as it would be with the learnt noise, which the model is given, too."""
    before, count = cast("Normal", model.likelihood).noise_std, problem.num_data * model.config.num_labels
    constant = 0.5 * math.log(2 * math.pi)
    found = [look(row, config.spec, gradient=config.check_gradient) for row in theta]
    squares = [-2 * before**2 * (one.log_lik + count * (math.log(before) + constant)) for one in found]

    def at(sigma: float) -> list[Survey]:
        ratio = (before / sigma) ** 2
        return [
            one._replace(
                curvature=one.curvature.scaled(ratio),
                log_lik=-0.5 * square / sigma**2 - count * (math.log(sigma) + constant),
                slope=None if one.slope is None else one.slope.scaled(ratio),
            )
            for one, square in zip(found, squares, strict=True)
        ]

    def expand(sigma: float) -> list[tuple[Any, Any]]:
        return [config.expand(row, one, problem) for row, one in zip(theta, at(sigma), strict=True)]

    sigma = fit_noise_of(expand, sum(squares), count * len(theta))
    model.likelihood = Normal(sigma)
    seen = {row.numpy().tobytes(): one for row, one in zip(theta, at(sigma), strict=True)}
    return lambda theta, what, *, gradient: seen[theta.numpy().tobytes()]


def _problem(
    model: BayesianModel, theta: Tensor, config: MethodConfig, num_data: float, inherited: Inherited | None = None
) -> Problem:
    if config.prior_mean == "initial":
        raise ValueError(
            'prior_mean="initial" is where training started, which a finished model no longer knows: use "zero"'
        )
    gaussian = None if inherited is None else inherited.gaussian
    prior = build_prior(config, model.layout, theta[0], model.model, gaussian)
    return Problem(num_data, prior, 1.0, 1, 0, model.layout.named_shapes)


@torch.no_grad()
def _by_heldout(
    model: BayesianModel, theta: Tensor, config: Any, look: Look, num_data: float, run: Callable, heldout: Any,
    prior_stds: Sequence[float], seed: int,
) -> tuple[Any, dict[str, float] | dict[str, dict[str, float]]]:  # fmt: skip
    """The config with the best prior_std, and {std: mean held-out nats per term}; of several, one by one around it."""
    for row in theta:
        look(row, config.spec, gradient=config.check_gradient)
    found: dict[tuple[float, ...], float] = {}
    stds = [float(std) for std in prior_stds]
    given = config.prior_std if isinstance(config.prior_std, dict) else {}
    names = list(given)
    if config.prior_scope == "tensor":
        # an expression for each tensor: the given ones may not cover it alone
        names = [f"^{re.escape(name)}$" for name in model.layout.names]

    def with_stds(values: Sequence[float]) -> Any:
        chosen = dict(zip(names, values, strict=True)) if names else values[0]
        return dataclasses.replace(config, prior_std=chosen, check_gradient=False)

    def nll(values: Sequence[float]) -> float:
        if tuple(values) not in found:
            candidate = with_stds(values)
            gaussian, _ = candidate.around(theta, look, _problem(model, theta, candidate, num_data))
            found[tuple(values)] = _nll(model, gaussian, run(heldout, range(len(heldout))), seed)
        return found[tuple(values)]

    best = min(([std] * max(1, len(names)) for std in stds), key=nll)
    moved = bool(names)
    while moved:
        before = best
        for place in range(len(names)):
            best = min([best, *([*best[:place], std, *best[place + 1 :]] for std in stds)], key=nll)
        moved = best != before
    _warn_of_ends(dict(zip(names or ["the model"], best, strict=True)), stds)
    around = {
        name: {f"{std:g}": nll([*best[:place], std, *best[place + 1 :]]) for std in stds}
        for place, name in enumerate(names or ["the model"])
    }
    return dataclasses.replace(with_stds(best), check_gradient=config.check_gradient), (
        around if names else around["the model"]
    )


def _warn_of_ends(chosen: Mapping[str, float], stds: Sequence[float]) -> None:
    ends = {name: std for name, std in chosen.items() if std in (min(stds), max(stds))}
    if ends and len(stds) > 1:
        some = ", ".join(f"{std:g} for {name}" for name, std in list(ends.items())[:4])
        more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
        warnings.warn(
            f"the held-out rows chose an end of prior_stds ({min(stds):g} to {max(stds):g}): {some}{more}. The best "
            "may lie beyond: give wider candidates"
        )


def _nll(model: BayesianModel, gaussian: Gaussian, batches: Iterator[dict[str, Any]], seed: int) -> float:
    """Mean over terms of -log mean_m p_m, of draws that every candidate shares but for their spread."""
    shown = model._shown
    model.show(gaussian.sample(NUM_MEMBERS * len(gaussian.means), generator(seed, "heldout")))
    try:
        return float(torch.cat([model.evaluate_batch(batch)[0]["nll"] for batch in batches]).double().mean())
    finally:
        model.show(shown)


def _batches(
    data: Any, rows: Sequence[int], *, model: BayesianModel, collate: Callable, batch_size: int
) -> Iterator[dict[str, Any]]:
    loader: DataLoader = DataLoader(data, batch_size=batch_size, sampler=rows, collate_fn=collate)
    for batch in loader:
        yield {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _num_classes(model: BayesianModel) -> int | None:
    if not isinstance(model.likelihood, Categorical):
        return None
    if isinstance(model, BayesianModelForCausalLM):
        return model.config.get_text_config().vocab_size
    return getattr(model.config, "num_labels", None)


def _load(directory: str | os.PathLike[str]) -> BayesianModel:
    # another task is refused where the file is read
    task = Posterior.from_pretrained(directory).config.task
    return MODELS[task].from_pretrained(directory)
