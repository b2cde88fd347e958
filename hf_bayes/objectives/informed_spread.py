"""The width of a posterior where the data outweigh the prior, measured on training rows (``informed_spread``)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Approximation, Prior
from hf_bayes.diagnostics.informed_spread import InformedSpread, informed_spread
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.methods.laplace.accumulators import UnsupportedModule
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite
from hf_bayes.methods.laplace.prior_precision import precision_of
from hf_bayes.methods.laplace.supported import CurvatureSpec, default_structure, drawn_or_empirical
from hf_bayes.methods.sgmcmc.whitening import MAX_BASIS
from hf_bayes.objectives.curvature_pass import NothingToExpand
from hf_bayes.objectives.model_objective import ModelObjective

NUM_DRAWS = {"draws": 16, "gaussian": 8}
"""The number of draws; it is larger for chains, whose draws may depend on each other. If the data determine n
directions, the relative standard error of 8 independent draws is sqrt(2 / (8 n)): 11 % for n = 20."""

LEAST_ROWS = 64
"""The smallest number of rows in a pass."""

SPREAD_SHARE = 0.05
"""The share of a run's gradients that the measurement may take."""

LINEAR_STEP = 0.1
"""The factor of the deviations if predictions are linearised. The members of such a Gaussian may be far outside the
region in which the model is linear, and predictions do not use them."""


class SpreadPlan(NamedTuple):
    """The draws to measure, and the posterior of which they should be draws.

    Attributes:
        approximation: draws of all chains, or a Gaussian; of a mixture of Gaussians the first one is measured.
        prior: log p(theta).
        shapes: name -> shape of each random tensor.
        prior_weight: the factor of the prior's energy.
        linearised: the Gaussian predicts by a linearised model.
        num_gradients: the number of gradients of one row that the run took, over all chains.
        mirrored: True if chain 2k + 1 had minus the noise of chain 2k.
    """

    approximation: Approximation
    prior: Prior
    shapes: Mapping[str, tuple[int, ...]]
    prior_weight: float
    linearised: bool
    num_gradients: float
    mirrored: bool = False


def measure_spread(objective: ModelObjective, plan: SpreadPlan, *, seed: int) -> InformedSpread | None:
    """Return the temperature in the directions that the data determine; None if it cannot be measured.

    The measurement needs rows by number, one process for all chains, 4 draws, modules that have gradients of single
    rows, and a run that is long enough for its cost (``SPREAD_SHARE``). A warning says if its rows have no likelihood
    term, or numbers that are not finite.
    """
    data, found, plan = objective.data, plan.approximation, plan._replace(prior=plan.prior.to(objective.model.theta))
    if data is None or objective.private is not None or objective.scale.num_terms is None:
        return None
    draws, point = _draws(found, seed, mirrored=plan.mirrored)
    share = plan.num_gradients * SPREAD_SHARE / ((len(draws) + 1) * data.num_rows)
    if len(draws) < 4 or share * data.num_rows < min(LEAST_ROWS, data.num_rows):
        return None
    share = min(1.0, share)
    center, step = draws.mean(0), LINEAR_STEP if plan.linearised else 1.0
    with evaluating(objective.model):
        gradients = grad_energy(objective, plan, center + step * (draws - center), share)
        if gradients is None:
            return None
        try:
            informed, num_informed = _informed(objective, plan, point, step * (draws - center), share)
        except UnsupportedModule:  # such as one that is called twice
            return None
        except (NothingToExpand, NotPositiveDefinite) as error:  # the finished run must not be lost
            warnings.warn(f"informed_spread was not measured on {share:.0%} of the rows: {error}")
            return None
    if num_informed < 1:
        return None
    temperature, std_error = informed_spread(informed / step, gradients / step, num_informed)
    # rows differ in the curvature that they add, with a relative standard deviation of about 1
    of_rows = temperature * math.sqrt((1 - share) / (share * data.num_rows))
    return InformedSpread(temperature, math.hypot(std_error, of_rows))


def _draws(found: Approximation, seed: int, *, mirrored: bool) -> tuple[Tensor, Tensor]:
    """Return draws [S, d], and the point [d] of the curvature: a Gaussian's mean, or the last draw.

    Stored draws are thinned evenly over the chains. Of a mirrored pair only the first chain is taken: near the mode of
    a Gaussian the other one has the same product of deviation and gradient, so both would count as two measurements.
    """
    if isinstance(found, Gaussian):
        first = Gaussian(found.means[:1], found.covariances[:1])
        return first.sample(NUM_DRAWS["gaussian"], generator(seed, "spread")), found.means[0]
    if mirrored and isinstance(found, Draws):
        kept = found.chain % 2 == 0
        found = Draws(found.theta[kept], found.chain[kept])
    draws = found.sample(min(NUM_DRAWS["draws"], found.num_stored))
    return draws, draws[-1]


def grad_energy(objective: ModelObjective, plan: SpreadPlan, theta: Tensor, share: float) -> Tensor | None:
    """Return grad U [S, d] without dropout, all from the same rows."""
    parts = []
    for some in theta.to(objective.model.theta).split(len(objective.passes.chains)):
        part = objective.full_gradient(some, share=share, without_dropout=True)
        if part is None:
            return None
        parts.append(-part - plan.prior_weight * plan.prior.grad(some))
    return torch.cat(parts).cpu()


def _informed(
    objective: ModelObjective, plan: SpreadPlan, point: Tensor, deviations: Tensor, share: float
) -> tuple[Tensor, float]:
    """Return B' deviations [S, d] and tr B, with B = H (H + tau)^-1 = 1 - tau (H + tau)^-1 at a point [d].

    Both are restricted to the elements that deviate.
    """
    shapes = tuple(plan.shapes.values())
    estimator = drawn_or_empirical(objective.model.likelihood.lacks)
    spec = CurvatureSpec(estimator=estimator, structure=default_structure(shapes, MAX_BASIS), share=share)
    curvature = objective.curvature(point, spec, gradient=False).curvature
    tau = plan.prior_weight * precision_of(plan.prior, curvature.diagonal).diagonal
    covariance = curvature.covariance(tau)
    deviations = deviations.to(tau)
    # a point has no deviation: it is given, and the law of the other elements is measured
    is_random = (deviations != 0).any(0)
    informed = (deviations - covariance.product(tau * deviations)) * is_random
    return informed.cpu(), float((1 - tau * covariance.variance)[is_random].double().sum())
