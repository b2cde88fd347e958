"""Fisher, empirical Fisher, GGN and Hessian of a function of named parameters, such as a plain ``torch.nn.Module``.

With J the Jacobian of the outputs of a batch, and c_k the cotangents of an estimator (``laplace.estimators``),

    H v = J' sum_k c_k w_k,      w_k = the sum over the terms of a row of c_k . (J v)

One product takes a Jacobian-vector product and a vector-Jacobian product for each batch, for every number of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from hf_bayes.chains.theta_form import Form
from hf_bayes.core.rng import generator
from hf_bayes.fit.curvature_operator import CurvatureOperator
from hf_bayes.methods.laplace.estimators import ESTIMATORS, Estimator, Terms, build_estimator
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood

Named = dict[str, Tensor]
"""Parameters by name, {name: tensor}."""

Outputs = Callable[[Named, Any], Tensor]
"""(parameters, inputs) -> outputs [B, ..., C]."""

Data = Iterable[tuple[Any, Tensor]]
"""Batches (inputs, labels) of all data: a list or a DataLoader, read once for each product."""


def outputs_of(module: torch.nn.Module) -> tuple[Outputs, Named]:
    """Return a module as a function of its trainable parameters, and these parameters.

    Inputs are one tensor, a tuple of arguments, or a dictionary of keyword arguments.
    """
    parameters = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: call requires_grad_() on some")

    def outputs(theta: Named, inputs: Any) -> Tensor:
        arguments: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        match inputs:
            case dict():
                named = inputs
            case tuple():
                arguments = inputs
            case _:
                arguments = (inputs,)
        found: Tensor = functional_call(module, theta, arguments, named)
        return found

    return outputs, parameters


def curvature_of_function(
    outputs: Outputs,
    theta: Named,
    data: Data,
    *,
    likelihood: Likelihood | None = None,
    estimator: str = "ggn",
    num_samples: int | None = None,
    seed: int = 0,
) -> CurvatureOperator:
    """Return the curvature of -log p(D | theta) of a function, as an operator: its products, matrix and systems.

    Args:
        outputs: (parameters, inputs) -> outputs [B, ..., C], such as logits; ``outputs_of`` makes one of a module.
        theta: {name: tensor}, the point.
        data: batches (inputs, labels).
        likelihood: the likelihood of the labels, such as ``Normal(noise_std)``; None is ``Categorical()``.
        estimator: "ggn", which is the Fisher matrix of these likelihoods; "ef_sequence" and "ef_token", the empirical
            Fisher of rows and of terms (equal if a row has one label); or "hessian".
        num_samples: number of label draws ("ggn") or random signs ("ef_token") per row; None is exact.
        seed: the seed of these draws, which are the same in every product.
    Raises:
        ValueError: for an unknown estimator, or parameters that are no named tensors.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    likelihood = Categorical() if likelihood is None else likelihood
    form, point = _flat(theta)
    _require_repeatable(data)

    def of_theta(flat: Tensor, inputs: Any) -> Tensor:
        return outputs(form.unflatten(flat), inputs)

    if estimator == "hessian":

        def products(vectors: Tensor) -> Tensor:
            return _hessian_products(of_theta, point, vectors, data, likelihood)
    else:
        built = build_estimator(estimator, num_samples)

        def products(vectors: Tensor) -> Tensor:
            return _outer_products(of_theta, point, vectors, data, likelihood, built, seed)

    assert form.layout is not None
    return CurvatureOperator(products, form.layout, point)


def row_gradients_of_function(
    outputs: Outputs, theta: Named, data: Data, *, likelihood: Likelihood | None = None
) -> Iterator[Tensor]:
    """Yield the gradient of each row's log-likelihood, [B, d] for each batch: never those of all rows together.

    Args:
        outputs, theta, data, likelihood: see ``curvature_of_function``. Inputs are tensors whose first axis is B, or
            tuples or dictionaries of such.
    """
    likelihood = Categorical() if likelihood is None else likelihood
    form, point = _flat(theta)

    def log_prob(flat: Tensor, inputs: Any, label: Tensor) -> Tensor:
        logits = outputs(form.unflatten(flat), _as_batch(inputs))
        return _log_probs(logits, label[None], likelihood).sum()

    for inputs, labels in data:
        with torch.no_grad():
            yield vmap(grad(log_prob), in_dims=(None, 0, 0))(point, inputs, labels)


def _as_batch(inputs: Any) -> Any:
    """Return the inputs of one row as a batch of one."""
    match inputs:
        case dict():
            return {name: value[None] for name, value in inputs.items()}
        case tuple():
            return tuple(value[None] for value in inputs)
    return inputs[None]


def _flat(theta: Named) -> tuple[Form[dict[str, Tensor]], Tensor]:
    """Return the form of named parameters, and the parameters as one tensor [d]."""
    if not isinstance(theta, dict) or not all(isinstance(value, Tensor) for value in theta.values()):
        raise ValueError(f"theta must be a dictionary {{name: tensor}}, got {theta!r:.100}")
    form, rows = Form.of({name: value.detach()[None] for name, value in theta.items()})
    return form, rows[0]


def _require_repeatable(data: Data) -> None:
    """Raise for an iterator, which the second product would find empty."""
    if isinstance(data, Iterator):
        raise ValueError(
            f"data is read once for every product, and a {type(data).__name__} can be read only once: give a list or a "
            "DataLoader without shuffling"
        )


def _log_probs(logits: Tensor, labels: Tensor, likelihood: Likelihood) -> Tensor:
    """Return the log-likelihood of the terms of some rows, 0 where a label is not a term."""
    flat = logits.reshape(1, -1, logits.shape[-1])
    return likelihood.log_prob(flat, labels.flatten(0, logits.ndim - 2)[None])


def _outer_products(
    of_theta: Callable[[Tensor, Any], Tensor], point: Tensor, vectors: Tensor, data: Data, likelihood: Likelihood,
    estimator: Estimator, seed: int,
) -> Tensor:  # fmt: skip
    """Return H v [k, d] for an estimator that is a sum of outer products."""
    total, rows_seen = torch.zeros_like(vectors), 0
    with torch.no_grad():
        for inputs, labels in data:
            logits, vjp_of, *_ = vjp(lambda flat, inputs=inputs: of_theta(flat, inputs), point)
            terms, index, row = _terms(logits, labels, likelihood, estimator, seed, rows_seen)
            rows_seen += len(logits)
            ordinals = int(terms.ordinals.max()) + 1 if len(index) else 1
            cotangents = torch.stack([
                estimator.cotangent(number, terms, likelihood)
                for number in range(estimator.num_vjps(likelihood, logits.shape[-1], ordinals))
            ])  # fmt: skip
            for place, vector in enumerate(vectors):
                tangent: Any = jvp(lambda flat, inputs=inputs: of_theta(flat, inputs), (point,), (vector,))[1]
                moved = tangent.reshape(-1, tangent.shape[-1])[index].to(cotangents)
                along = (cotangents * moved).sum(2)  # [K, n]
                of_rows = along.new_zeros(len(along), len(logits)).index_add(1, row, along)
                combined = (cotangents * of_rows[:, row, None]).sum(0)
                upstream = torch.zeros_like(logits).view(-1, logits.shape[-1])
                upstream[index] = combined.to(upstream)
                total[place] += vjp_of(upstream.view_as(logits))[0]
    return total


def _terms(
    logits: Tensor, labels: Tensor, likelihood: Likelihood, estimator: Estimator, seed: int, first: int
) -> tuple[Terms, Tensor, Tensor]:
    """Return the likelihood terms of a batch, their places among all outputs, and the row of each."""
    is_term = likelihood.is_term(labels)
    index = is_term.flatten().nonzero()[:, 0]
    per_row = is_term.reshape(len(logits), -1)
    row = torch.arange(len(logits), device=logits.device).repeat_interleave(per_row.sum(1))
    ordinals = (per_row.cumsum(1) - 1).flatten()[index]
    shape = (logits.shape[-1],) if likelihood.labels_per_output else ()
    uniforms = torch.rand(
        estimator.num_draws, len(index), *shape, generator=generator(seed, "labels", first), dtype=torch.float64
    )
    flat, targets = logits.reshape(-1, logits.shape[-1]), labels.flatten(0, logits.ndim - 2)
    return Terms(flat[index], targets[index], ordinals, uniforms.to(logits.device)), index, row


def _hessian_products(
    of_theta: Callable[[Tensor, Any], Tensor], point: Tensor, vectors: Tensor, data: Data, likelihood: Likelihood
) -> Tensor:
    """Return H v [k, d] for the Hessian of -log p(D | theta)."""
    total = torch.zeros_like(vectors)
    for inputs, labels in data:

        def nll(flat: Tensor, inputs: Any = inputs, labels: Tensor = labels) -> Tensor:
            return -_log_probs(of_theta(flat, inputs), labels, likelihood).sum()

        for place, vector in enumerate(vectors):
            total[place] += jvp(grad(nll), (point,), (vector,))[1].detach()
    return total
