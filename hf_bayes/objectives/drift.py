"""The drift of a Gaussian's epistemic uncertainty when its draws move by the exact energy of all rows.

Hamiltonian dynamics leaves exp(-U / T) invariant. So if the draws of a Gaussian are draws of the posterior, a short
trajectory from each draw does not change their mean epistemic uncertainty (EU), in any dimension. If the mean or a
width is wrong, EU moves towards the EU of the posterior. With the velocity u ~ N(0, Sigma), that is with the masses
Sigma^-1,

    theta += h u / 2,   u -= h Sigma grad U(theta) / T,   theta += h u / 2

whitens the energy, so every direction in which the Gaussian is right has the same period 2 pi. Trajectories with the
Gaussian's own energy keep its EU. They have the same random numbers as the exact trajectories, so the ratio of the two
EUs has little noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.objectives.informed_spread import SpreadPlan, grad_energy
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.uncertainty.decomposition import decompose

STEP, NUM_STEPS = 0.5, 2
"""Trajectories of length 1 in whitened coordinates. Where the posterior is narrower than the Gaussian by up to 1.7
standard deviations, nearly all of the error in width and in mean is then gone; of smaller errors about half."""

NUM_PAIRS = 2
"""The number of pairs of draws. The two draws of a pair are mirror images around the mean, with opposite velocities, so
that odd functions cancel."""

DRIFT_SHARE = 0.3
"""The share of a run's gradients that the trajectories may take. They need all rows, because part of the rows has
another posterior. A run of 27 epochs is long enough."""

NUM_ROWS = 256
"""The number of training rows whose EU is compared."""

MAX_CURVED = 1e-3
"""The largest relative curvature of outputs in theta that counts as linear: float32 rounding is below it."""


@torch.no_grad()
def measure_drift(objective: ModelObjective, plan: SpreadPlan, *, seed: int, temperature: float = 1.0) -> float | None:
    """Return the EU of a Gaussian's draws after trajectories of the exact energy, over the EU before.

    The result is None for draws, for likelihoods without classes, for a linearised Gaussian if the model is not linear
    in theta, and for a run that is too short (``DRIFT_SHARE``).
    """
    found, data, model = plan.approximation, objective.data, objective.model
    if not isinstance(found, Gaussian) or data is None or not model.likelihood.predicts_classes:
        return None
    if 2 * NUM_PAIRS * NUM_STEPS * data.num_rows > DRIFT_SHARE * plan.num_gradients:
        return None
    plan = plan._replace(prior=plan.prior.to(model.theta))
    few = data.part(min(1.0, NUM_ROWS / data.num_rows), seed)
    rows = [objective.passes.prepare(batch) for batch in few.batches(range(few.num_rows))]
    center, covariance, rng = found.means[0], found.covariances[0], generator(seed, "drift")
    apart, velocity = (_mirrored(covariance.root(_normals(len(center), rng).to(center))) for _ in range(2))
    with evaluating(model):
        if plan.linearised and not _is_linear(objective, rows, center, apart):
            return None
        exact, own = [apart, velocity], [apart, velocity]
        for _ in range(NUM_STEPS):
            middle = center + exact[0] + STEP / 2 * exact[1]
            gradients = grad_energy(objective, plan, middle, 1.0)
            if gradients is None:
                return None
            exact = _moved(exact, covariance.product(gradients.to(center)) / temperature)
            own = _moved(own, own[0] + STEP / 2 * own[1])
        after, before = (_epistemic(objective, rows, center + state[0]) for state in (exact, own))
    return after / before if before > 0 else None


def _normals(dim: int, rng: torch.Generator) -> Tensor:
    return torch.randn(NUM_PAIRS, dim, generator=rng)


def _mirrored(values: Tensor) -> Tensor:
    return torch.cat([values, -values])


def _moved(state: list[Tensor], force: Tensor) -> list[Tensor]:
    """Return deviations and velocities [S, d] after a step, given Sigma grad U in its middle."""
    velocity = state[1] - STEP * force
    return [state[0] + STEP / 2 * (state[1] + velocity), velocity]


def _epistemic(objective: ModelObjective, rows: list[dict[str, Tensor]], theta: Tensor) -> float:
    """Return the mean EU of likelihood terms under members theta [S, d]."""
    parts = _of_terms(objective, rows, theta, lambda logits, _: decompose(logits).epistemic.double())
    return float(torch.cat(parts).mean())


def _is_linear(objective: ModelObjective, rows: list[dict[str, Tensor]], center: Tensor, apart: Tensor) -> bool:
    """Check whether outputs are linear in theta between center - apart[0] and center + apart[0]."""

    def curved(logits: Tensor, _: Tensor) -> Tensor:
        logits = logits.double()
        bend, change = logits[0] + logits[1] - 2 * logits[2], logits[0] - logits[1]
        return torch.stack([bend.abs().max(), change.abs().max()])

    theta = center + torch.stack([apart[0], -apart[0], torch.zeros_like(center)])
    bend, change = torch.stack(_of_terms(objective, rows, theta, curved)).amax(0).tolist()
    return bool(bend <= MAX_CURVED * change)


def _of_terms(
    objective: ModelObjective,
    rows: list[dict[str, Tensor]],
    theta: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
) -> list[Tensor]:
    model = objective.model
    with model.showing(theta.to(model.theta)), objective.passes.context():
        return [part for batch in rows for part in model.each_term(batch, function)]
