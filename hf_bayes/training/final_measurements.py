"""Measurements of a finished run by its exact energy: the width of its result, and the drift of its uncertainty."""

from __future__ import annotations

from hf_bayes.core.types import Approximation
from hf_bayes.diagnostics.informed_spread import InformedSpread
from hf_bayes.objectives.drift import measure_drift
from hf_bayes.objectives.informed_spread import SpreadPlan, measure_spread
from hf_bayes.training.active_run import ActiveRun


def informed_temperature(active: ActiveRun, found: Approximation) -> InformedSpread | None:
    """Return the temperature of a finished run in the directions that the data determine; None if not measured."""
    plan = spread_plan(active, found)
    return None if plan is None else measure_spread(active.objective, plan, seed=active.host.args.seed)


def drift(active: ActiveRun, found: Approximation) -> float | None:
    """Return ``Measurements.epistemic_drift`` of a finished run; None if not measured."""
    plan, temperature = spread_plan(active, found), active.method.temperature or 1.0
    if plan is None:
        return None
    return measure_drift(active.objective, plan, seed=active.host.args.seed, temperature=temperature)


def spread_plan(active: ActiveRun, found: Approximation) -> SpreadPlan | None:
    """Return what to measure of a finished run; None if its energy is not known, or it has no draws.

    Args:
        active: the run. One that was stopped took fewer gradients than planned, so its measurement may use fewer.
        found: its result.
    """
    method = active.method
    if active.was_fitted or method.requirements.fits_prior:
        return None  # its energy is another one now
    if active.setup.model.members.batch_norms:  # the likelihood of a row depends on the other rows of its batch
        return None
    if method.requirements.final_pass and method.requirements.heldout != "none":
        return None  # held-out rows determine the width, and not the energy
    is_optimum = method.temperature == 0 and found.num_stored > 0
    if is_optimum or method.requirements.drops_inputs or active.setup.mesh.chain_size > 1:
        return None
    count = active.run.num_updates * active.rows.scale.rows_per_update * method.num_chains
    num_gradients = float(count * method.requirements.gradients_per_update)
    return SpreadPlan(
        found, active.prior, active.problem.shapes, method.prior_weight,
        method.requirements.predicts_linearised, num_gradients, active.mirrored,
    )  # fmt: skip
