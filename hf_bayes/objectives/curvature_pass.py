"""One pass over the data at a fixed theta: log-likelihood, gradient and curvature. The model is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.covariance import moved
from hf_bayes.members.module_hooks import LayerHooks, pieces
from hf_bayes.members.single_member import as_single_model
from hf_bayes.methods.laplace.accumulators import GradientSum
from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.estimators import EmpiricalFisherOfRows
from hf_bayes.methods.laplace.gradient_estimate import Slope
from hf_bayes.methods.laplace.gradient_estimate import halves as halves_of
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.objectives.curvature_products import CausalPass, Job, OutputPass
from hf_bayes.uncertainty.likelihoods import next_tokens

Batches = Callable[[Sequence[int]], Iterable[dict[str, Any]]]
"""Numbers of rows in the data -> these rows, in this order, in batches."""

TRUE = EmpiricalFisherOfRows()
"""The VJPs of the scores at the data's labels. Their sum over rows is the gradient of the log-likelihood."""


class Survey(NamedTuple):
    """The result of a pass, on the scale of the full data.

    Attributes:
        curvature: H of -log p(D | theta).
        log_lik: log p(D | theta) in nats.
        slope: grad log p(D | theta); None if nobody asked.
        num_rows: examples or sequences.
        num_terms: likelihood terms.
        fallbacks: {parameter: why it is kept diagonally}.
    """

    curvature: Curvature
    log_lik: float
    slope: Slope | None
    num_rows: int
    num_terms: int
    fallbacks: dict[str, str]


def survey(
    model: BayesianModel,
    theta: Tensor,
    batches: Batches,
    num_rows: int,
    spec: CurvatureSpec,
    *,
    scale: float = 1.0,
    gradient: bool = True,
    seed: int = 0,
    mesh: ChainMesh | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Survey:
    """Return log-likelihood, gradient and curvature of all data at theta.

    Dropout is off meanwhile. Memory is that of a training step with the batch (of a random head: plus the logits of one
    row) and of what the structure keeps.

    Args:
        theta: [d].
        batches: gives rows of the data; labels as the model takes them.
        num_rows: in the data.
        spec: estimator and structure.
        scale: nats of the result per nat of a term: N over the number of terms, where N is not that number.
        gradient: find the gradient, too: of many rows and parameters from a part of the rows (``laplace.slope``), of
            few for half a training step more, of ``ef_sequence`` exactly and at no cost.
        seed: of labels and signs; those of a row depend on its number, and not on batches or processes.
        mesh: its processes that share a chain share the rows, too, and each finds the whole; None is one process.
        context: entered around forwards, for autocast.
    Raises:
        ValueError: before the pass, for a cell of estimator and structure that does not exist or has too many
            parameters; for data without terms or with gradients that are not finite.
    """
    spec.check()
    spec.check_size(model.layout.dim, None, None)
    everything = range(num_rows)
    if spec.estimator == "hessian":
        with as_single_model(model.members, theta) as random:
            return _hessian(model, theta, random, batches, num_rows, spec, scale, mesh, context)
    layout, estimator = model.layout, spec.build_estimator()
    with as_single_model(model.members, theta):
        hooks = LayerHooks(model.model, layout.names)
        run = partial(_run, model, hooks, theta, batches, seed=seed, mesh=mesh, context=context)
        accumulator, fallbacks = spec.accumulator(layout, theta, hooks.layers)
        # rows' own scores are what the gradient is made of: it is exact at no cost
        free = isinstance(estimator, EmpiricalFisherOfRows)
        halves = halves_of(num_rows, layout.dim, seed) if gradient and not free else None
        slopes = [GradientSum(layout, theta) for _ in halves or range(1 if gradient else 0)]
        jobs: list[Job] = [(estimator, [accumulator, *slopes] if free else [accumulator])]
        if halves is None and slopes and not free:
            jobs.append((TRUE, [*slopes]))
        log_lik, num_terms = run(jobs, everything)
        if num_terms == 0:
            raise ValueError(
                "the data hold no likelihood term (all labels are -100 after the causal shift): check labels"
            )
        _require_finite("log-likelihood", torch.tensor(log_lik))
        for slope, half in zip(slopes, halves or [], strict=False):
            run([(TRUE, [slope])], half)
        found = _slope(slopes, halves, num_rows, scale)
        if spec.structure == "kronecker_corrected":
            assert isinstance(accumulator, KroneckerSum)
            accumulator = accumulator.corrected()
            run([(estimator, [accumulator])], everything)
    curvature = moved(accumulator.result().scaled(scale), "cpu")
    return Survey(curvature, scale * log_lik, found, num_rows, int(num_terms), fallbacks)


def _slope(slopes: list[GradientSum], halves: list[list[int]] | None, num_rows: int, scale: float) -> Slope | None:
    if not slopes:
        return None
    totals = torch.stack([slope.total() for slope in slopes]).cpu()
    _require_finite("gradient", totals)
    if halves is None:
        return Slope(scale * totals.expand(2, -1), num_rows, num_rows)
    size = len(halves[0])
    return Slope(scale * num_rows / size * totals, 2 * size, num_rows)


def _require_finite(what: str, value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise ValueError(f"the {what} at the given weights is not finite: there is nothing to expand around")


def _run(
    model: BayesianModel,
    hooks: LayerHooks,
    theta: Tensor,
    batches: Batches,
    jobs: list[Job],
    rows: Sequence[int],
    *,
    seed: int,
    mesh: ChainMesh | None,
    context: Callable[[], AbstractContextManager[Any]],
) -> list[float]:
    """Tell the accumulators of some rows; their log-likelihood and terms."""
    kind = CausalPass if isinstance(model, BayesianModelForCausalLM) else OutputPass
    mine = _share(rows, mesh)
    one = kind(model, hooks, jobs, mine, seed)
    with hooks.open(), torch.enable_grad():
        for batch in batches(mine):
            # a tensor that two modules own needs the gradient of each row whole
            for part in pieces(batch, 1 if any(layer.tied for layer in hooks.layers) else None):
                with context():
                    one.add_batch(part)
    if one.num_terms:  # without terms nobody reads a language model's head
        hooks.check_all_called()
    if mesh is not None and mesh.data_size > 1:
        for _, accumulators in jobs:
            for accumulator in accumulators:
                accumulator.sum_over(mesh)
    return _sum((one.log_lik, one.num_terms), theta, mesh)


def _share(rows: Sequence[int], mesh: ChainMesh | None) -> list[int]:
    """Return the rows of this process."""
    numbers = torch.as_tensor(rows)
    return (numbers if mesh is None else numbers.tensor_split(mesh.data_size)[mesh.data_rank]).tolist()


def _sum(values: tuple[float, ...], like: Tensor, mesh: ChainMesh | None) -> list[float]:
    """Over the processes that share rows."""
    total = torch.tensor(values, dtype=torch.float64)
    return (total if mesh is None else mesh.sum_over_data(total.to(like.device))).tolist()


def _hessian(
    model: BayesianModel,
    theta: Tensor,
    random: dict[str, nn.Parameter],
    batches: Batches,
    num_rows: int,
    spec: CurvatureSpec,
    scale: float,
    mesh: ChainMesh | None,
    context: Callable[[], AbstractContextManager[Any]],
) -> Survey:
    """Column by column, through the gradient's own graph."""
    dim, causal, parameters = model.layout.dim, isinstance(model, BayesianModelForCausalLM), list(random.values())
    matrix, slope = theta.new_zeros(dim, dim), theta.new_zeros(dim)
    log_lik, num_terms = 0.0, 0.0
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        # other attention kernels have no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for batch in batches(_share(range(num_rows), mesh)):
                inputs = dict(batch)
                if isinstance(model, BayesianModelForCausalLM):
                    inputs = model.numbered({**batch, "use_cache": False})
                labels = inputs.pop("labels")
                labels = next_tokens(labels, inputs.get("attention_mask")) if causal else labels
                with context():
                    logits = model.members.forward(inputs).logits
                labels = labels.flatten(0, logits.ndim - 2)
                value = model.likelihood.log_prob(logits.view(1, -1, logits.shape[-1]), labels[None]).sum()
                first = torch.autograd.grad(value, parameters, create_graph=True)
                flat = torch.cat([g.flatten() for g in first])
                for column in range(dim):
                    second = torch.autograd.grad(flat[column], parameters, retain_graph=True, allow_unused=True)
                    pairs = zip(second, parameters, strict=True)
                    filled = [torch.zeros_like(p) if g is None else g for g, p in pairs]
                    matrix[column] -= torch.cat([g.flatten() for g in filled]).to(matrix)
                slope += flat.detach().to(slope)
                log_lik += float(value.detach())
                num_terms += int(model.likelihood.is_term(labels).sum())
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
    log_lik, num_terms = _sum((log_lik, num_terms), theta, mesh)
    if mesh is not None:
        mesh.sum_over_data(matrix)
        mesh.sum_over_data(slope)
    matrix = (matrix + matrix.mT) / 2
    curvature: Curvature = FullCurvature(matrix, hessian=True)
    if spec.structure == "diagonal":
        curvature = DiagonalCurvature(matrix.diagonal().clone(), hessian=True)
    found = Slope(scale * slope.cpu().expand(2, -1), num_rows, num_rows)
    return Survey(moved(curvature.scaled(scale), "cpu"), scale * log_lik, found, num_rows, int(num_terms), {})
