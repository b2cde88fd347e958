"""One pass over the data at a fixed theta: log-likelihood, gradient and curvature. The model is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bayes.distributions.covariance import moved
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.members.module_hooks import LayerHooks, pieces
from hf_bayes.members.pictures import pictures_of
from hf_bayes.members.single_member import as_single_model
from hf_bayes.methods.laplace.accumulators import GradientSum
from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.estimators import EmpiricalFisherOfRows
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate, draw_half_batches
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.answer_products import AnswerPass
from hf_bayes.objectives.curvature_products import CausalPass, CurvaturePass, Job, OutputPass
from hf_bayes.objectives.likelihood_terms import all_ignored

Batches = Callable[[Sequence[int]], Iterable[dict[str, Any]]]
"""Numbers of rows in the data -> these rows, in this order, in batches."""

PASSES: dict[str, type[CurvaturePass]] = {"outputs": OutputPass, "token": CausalPass, "answers": AnswerPass}
"""``BayesianModel.term_kind`` -> the pass for such terms."""

TRUE = EmpiricalFisherOfRows()
"""The VJPs of the scores at the data's labels, whose sum over rows is the gradient of the log-likelihood.

The VJP of a row of weight w is the gradient divided by sqrt(w). ``GradientSum`` and ``RowGradients`` multiply by it.
"""


class NothingToExpand(ValueError):
    """The error of rows without likelihood terms, or with a log-likelihood or a gradient that is not finite."""


class CurvaturePassResult(NamedTuple):
    """The result of a pass, on the scale of the full data.

    Attributes:
        curvature: H of -log p(D | theta).
        log_lik: log p(D | theta) in nats.
        gradient: grad log p(D | theta); None if it was not requested.
        num_rows: the number of examples or sequences.
        num_terms: the number of likelihood terms.
        fallbacks: {parameter: the reason for which only a diagonal of its curvature is kept}.
    """

    curvature: Curvature
    log_lik: float
    gradient: GradientEstimate | None
    num_rows: int
    num_terms: int
    fallbacks: dict[str, str]


def run_curvature_pass(
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
) -> CurvaturePassResult:
    """Return log-likelihood, gradient and curvature of all data at theta.

    Dropout is off during the pass. The pass needs the memory of a training step on a batch, and the memory of the
    result. With a random head it also needs the logits of one row.

    Args:
        theta: [d].
        batches: a function that returns rows of the data, with labels as the model takes them.
        num_rows: the number of rows of the data.
        spec: estimator and structure.
        scale: the factor of the result: N over the number of terms, if these two differ.
        gradient: compute the gradient, too: for many rows and parameters from a part of the rows
            (``laplace.gradient_estimate``), for few rows at the cost of half a training step more, for ``ef_sequence``
            exactly and at no cost.
        seed: seed of labels and signs. Those of a row depend on its number, and not on batches or processes.
        mesh: the processes. Those that share a chain share the rows, too, and each returns the result for all rows.
            None is one process.
        context: the context of each forward pass, for autocast.
    Raises:
        ValueError: before the pass, for a combination of estimator and structure that does not exist or has too many
            parameters. It is a ``NothingToExpand`` for data without terms or with gradients that are not finite, and an
            ``UnsupportedModule`` for a module that the pass cannot serve.
    """
    spec = spec.of_model(model.layout.shapes)
    spec.check()
    spec.check_size(model.layout.dim)
    data = PassData(batches, num_rows, scale, seed, mesh, context)
    with as_single_model(model.members, theta) as random:
        if spec.estimator == "hessian":
            return _hessian(model, theta, random, data, spec, gradient=gradient)
        return _outer_products(model, theta, data, spec, gradient=gradient)


class PassData(NamedTuple):
    """The data of a pass, see the arguments of ``run_curvature_pass``."""

    batches: Batches
    num_rows: int
    scale: float
    seed: int
    mesh: ChainMesh | None
    context: Callable[[], AbstractContextManager[Any]]


def hooks_of(model: BayesianModel) -> LayerHooks:
    """Return hooks on all layers of a model that own random parameters."""
    return LayerHooks(model.model, model.layout.names, model.members.names_of_images)


def _outer_products(
    model: BayesianModel, theta: Tensor, data: PassData, spec: CurvatureSpec, *, gradient: bool
) -> CurvaturePassResult:
    """Return the result for an estimator that is a sum of outer products of vector-Jacobian products (VJPs)."""
    estimator, hooks = spec.build_estimator(), hooks_of(model)
    run = partial(run_vjps, model, hooks, theta, data)
    accumulator, fallbacks = spec.accumulator(model.layout, theta, hooks.layers)
    half_batches, sums = None, [GradientSum(model.layout, theta)] if gradient else []
    jobs: list[Job] = [(estimator, [accumulator])]
    if isinstance(estimator, EmpiricalFisherOfRows):  # the gradient is the sum of the same VJPs: exact at no cost
        jobs = [(estimator, [accumulator, *sums])]
    elif gradient:
        half_batches = draw_half_batches(data.num_rows, model.layout.dim, data.seed)
        if half_batches is None:
            jobs.append((TRUE, [*sums]))
        else:
            sums = [GradientSum(model.layout, theta) for _ in half_batches]
    log_lik, num_terms = run(jobs, range(data.num_rows))
    _require_terms(model, log_lik, num_terms)
    for total, rows in zip(sums, half_batches or [], strict=False):
        run([(TRUE, [total])], rows)
    found = _gradient_estimate(sums, half_batches, data) if gradient else None
    if spec.structure == "kronecker_corrected":
        assert isinstance(accumulator, KroneckerSum)
        accumulator = accumulator.corrected()
        run([(estimator, [accumulator])], range(data.num_rows))
    curvature = moved(accumulator.result().scaled(data.scale), "cpu")
    return CurvaturePassResult(curvature, data.scale * log_lik, found, data.num_rows, int(num_terms), fallbacks)


def _gradient_estimate(
    sums: list[GradientSum], half_batches: list[list[int]] | None, data: PassData
) -> GradientEstimate:
    """Return the gradient on the scale of all data, from the sum over all rows or from the sums over two halves."""
    totals = torch.stack([each.total() for each in sums]).cpu()
    _require_finite("gradient", totals)
    if half_batches is None:
        return GradientEstimate(data.scale * totals.expand(2, -1), data.num_rows, data.num_rows)
    size = len(half_batches[0])
    return GradientEstimate(data.scale * data.num_rows / size * totals, 2 * size, data.num_rows)


def _require_terms(model: BayesianModel, log_lik: float, num_terms: float) -> None:
    """Raise ``NothingToExpand`` for data without likelihood terms, or whose log-likelihood is not finite."""
    if num_terms == 0:
        reason = all_ignored(shift=model.term_kind == "token")
        raise NothingToExpand(f"the data hold no likelihood term ({reason}): check labels")
    _require_finite("log-likelihood", torch.tensor(log_lik))


def _require_finite(what: str, value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise NothingToExpand(f"the {what} at the given weights is not finite: there is nothing to expand around")


def run_vjps(
    model: BayesianModel, hooks: LayerHooks, theta: Tensor, data: PassData, jobs: list[Job], rows: Sequence[int]
) -> list[float]:
    """Pass the VJPs of some rows to the accumulators, and return the rows' log-likelihood and number of terms."""
    own_rows = _share(rows, data.mesh)
    one = pass_of(model)(model, hooks, jobs, own_rows, data.seed)
    reads_all = not model.members.names_of_images  # without images, the part that reads them is not called
    with hooks.open(), torch.enable_grad():
        for batch in data.batches(own_rows):
            reads_all = reads_all or batch.get("pixel_values") is not None
            # a tensor that two modules own needs the whole gradient of each row
            for part in _parts(model, batch, 1 if any(layer.tied for layer in hooks.layers) else None):
                with data.context():
                    one.add_batch(part)
    if one.num_terms and reads_all:  # without terms the head of a language model is not called
        hooks.check_all_called()
    if data.mesh is not None and data.mesh.data_size > 1:
        for _, accumulators in jobs:
            for accumulator in accumulators:
                accumulator.sum_over(data.mesh)
    return _sum((one.log_lik, one.num_terms), theta, data.mesh)


def _parts(model: BayesianModel, batch: dict[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """Yield a batch in pieces, as ``module_hooks.pieces`` does, and each row with its own images."""
    ids = batch.get("input_ids")
    if ids is None or not pictures_of(batch):
        yield from pieces(batch, size)
        return
    numbers = [part["rows"] for part in pieces({"input_ids": ids, "rows": torch.arange(len(ids))}, size)]
    yield from (batch,) if len(numbers) == 1 else (model.take_rows(batch, rows) for rows in numbers)


def pass_of(model: BayesianModel) -> type[CurvaturePass]:
    """Return the kind of pass that belongs to a model."""
    return PASSES[model.term_kind]


def _share(rows: Sequence[int], mesh: ChainMesh | None) -> list[int]:
    """Return the rows of this process."""
    numbers = torch.as_tensor(rows)
    return (numbers if mesh is None else numbers.tensor_split(mesh.data_size)[mesh.data_rank]).tolist()


def _sum(values: tuple[float, ...], like: Tensor, mesh: ChainMesh | None) -> list[float]:
    """Return the sums over the processes that share rows."""
    total = torch.tensor(values, dtype=torch.float64)
    return (total if mesh is None else mesh.sum_over_data(total.to(like.device))).tolist()


def _hessian(
    model: BayesianModel,
    theta: Tensor,
    random: dict[str, nn.Parameter],
    data: PassData,
    spec: CurvatureSpec,
    *,
    gradient: bool,
) -> CurvaturePassResult:
    """Return the result for the Hessian, computed column by column through the graph of the gradient."""
    dim, parameters = model.layout.dim, list(random.values())
    scale, mesh, num_rows = data.scale, data.mesh, data.num_rows
    matrix, gradient_sum = theta.new_zeros(dim, dim), theta.new_zeros(dim)
    log_lik, num_terms = 0.0, 0.0
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        # other attention kernels have no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for batch in data.batches(_share(range(num_rows), mesh)):
                with data.context():
                    value, terms = pass_of(model).log_lik_of(model, batch)
                if not terms:  # a sum over nothing may not depend on theta
                    continue
                first = torch.autograd.grad(value, parameters, create_graph=True)
                flat = torch.cat([g.flatten() for g in first])
                for column in range(dim):
                    second = torch.autograd.grad(flat[column], parameters, retain_graph=True, allow_unused=True)
                    pairs = zip(second, parameters, strict=True)
                    filled = [torch.zeros_like(p) if g is None else g for g, p in pairs]
                    matrix[column] -= torch.cat([g.flatten() for g in filled]).to(matrix)
                gradient_sum += flat.detach().to(gradient_sum)
                log_lik += float(value.detach())
                num_terms += terms
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
    log_lik, num_terms = _sum((log_lik, num_terms), theta, mesh)
    if mesh is not None:
        mesh.sum_over_data(matrix)
        mesh.sum_over_data(gradient_sum)
    _require_terms(model, log_lik, num_terms)
    _require_finite("gradient", gradient_sum)
    _require_finite("Hessian", matrix)
    matrix = (matrix + matrix.mT) / 2
    curvature: Curvature = FullCurvature(matrix, hessian=True)
    if spec.structure == "diagonal":
        curvature = DiagonalCurvature(matrix.diagonal().clone(), hessian=True)
    found = GradientEstimate(scale * gradient_sum.cpu().expand(2, -1), num_rows, num_rows) if gradient else None
    return CurvaturePassResult(
        moved(curvature.scaled(scale), "cpu"), scale * log_lik, found, num_rows, int(num_terms), {}
    )
