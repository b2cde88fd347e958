"""Start the chains of a method on a model: put prior, method, objective and generators together.

A fit to a finished model, which makes no update, takes ``problem_for`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from hf_bayes.chains.run import Run
from hf_bayes.chains.starting_points import initial_members
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.likelihood_facts import LikelihoodFacts
from hf_bayes.core.schedules import burn_in_steps, draw_steps
from hf_bayes.core.types import Kernel, Prior, Problem, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.distributions.priors import build_prior
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.assembly import assemble, generators_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.likelihood_terms import count_terms_of
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.model_settings import Settings, TryRates, settle_model
from hf_bayes.objectives.passes import MemberPasses, member_passes
from hf_bayes.objectives.private_rows import PrivateRows
from hf_bayes.objectives.range_test import RangeTest, plan_for, range_test


class StartedRun(NamedTuple):
    """Chains that are ready for their first update.

    Attributes:
        run: the chains.
        objective: the log-likelihood that they are run on.
        prior: log p(theta).
        settings: the method, with numbers in place of settings that were left open.
    """

    run: Run[Any]
    objective: ModelObjective
    prior: IndependentPrior | Gaussian
    settings: Settings


def scale_of(
    model: BayesianModel, rows: Any, collate: Callable[..., Any], *, rows_per_update: int, progress: bool = False
) -> DataScale:
    """Return the size of data with a length: N is the number of its likelihood terms.

    Args:
        model: an attached model.
        rows: the training data.
        collate: rows -> a batch with labels.
        rows_per_update: the number of rows that each chain sees in an update.
        progress: show a bar.
    """
    terms, _ = count_terms_of(model, rows, collate, progress=progress)
    return DataScale(float(terms), len(rows), terms, rows_per_update)


def start_run(
    model: BayesianModel, method: MethodConfig, scale: DataScale, *, num_steps: int, learning_rate: float | None,
    seed: int = 0, start: Tensor | None = None, theta: Tensor | None = None, inherited: Gaussian | None = None,
    mesh: ChainMesh | None = None, data: DataAccess | None = None, private: PrivateRows | None = None,
    most_terms: int | None = None, batch_fraction: float | None = None,
    trial_updates: Callable[[], Iterable[list[Any]]] | None = None, found_rate: float | None = None,
    falls: bool = True, progress: bool = False, **options: Any,
) -> StartedRun:  # fmt: skip
    """Return the chains of a method on a model, each with a seeded starting point of its own.

    Args:
        model: an attached model.
        method: a config of ``hf_bayes.METHODS``.
        scale: the size of the data and of an update.
        num_steps: the number of updates of the run.
        learning_rate: the peak of the method's schedule; None leaves it to the method, see ``settle_model``.
        seed: the seed of starting points, noise and dropout masks.
        start: [d] the weights around which chains start; None takes those of the model.
        theta: [M, d] the starting points of the chains of this process; None draws them around ``start``.
        inherited: an earlier posterior, which is the prior; None takes the prior of the config.
        mesh: the processes; None is this one alone.
        data: rows by number, for a method that passes over them; None without such rows.
        private: the rows of this process, if processes keep their rows to themselves; otherwise None.
        most_terms, batch_fraction: likelihood terms of the largest row, and the share of the data in a batch, if known.
        trial_updates: returns the batches of updates, shared by all chains, to try learning rates of AdamW on.
        found_rate: the rate that this trial has found, for a run that resumes.
        falls: the rate that an optimiser finds for itself falls linearly to 0; False leaves this to the caller.
        progress: show a progress bar for the trial.
        options: further arguments of ``member_passes``, such as ``shared`` or ``context``.
    Raises:
        ValueError: if the method cannot run on this problem.
    """
    _require_data_access(method, data)
    mesh = ChainMesh(method.num_chains, model.device) if mesh is None else mesh
    start = model.theta.detach()[0] if start is None else start
    theta = initial_members(model.layout, start, method, seed=seed, chains=mesh.chains) if theta is None else theta
    prior = build_prior(method, model.layout, start, model.model, inherited)
    problem = problem_for(
        model, prior.to(theta), scale.num_data, num_steps=num_steps, most_terms=most_terms,
        batch_fraction=batch_fraction, update_fraction=scale.update_fraction, seed=seed,
    )  # fmt: skip
    passes = member_passes(model, mesh=mesh, seed=seed, **options)
    trial = None
    if trial_updates is not None:
        trial = _trial(passes, scale, start.to(theta), problem, trial_updates, method, progress=progress)
    settings = settle_model(method, learning_rate, num_steps, trial, found_rate, falls=falls)
    problem = _with_settings(problem, settings, has_rows=data is not None)
    built = assemble(settings.method, problem)
    needs = _needs_of(settings.method, built, problem)
    # an exact kernel needs a target that does not change between two evaluations
    passes = replace(passes, dropout=not built.is_exact)
    objective = ModelObjective(passes, scale, data=data, private=private, **needs)
    rngs = generators_of(settings.method, problem, seed, method.num_chains, chains=mesh.chains, device=theta.device)
    run = Run(
        built, objective, theta, rngs, problem, chains=mesh.chains, watch_noise=objective.measures_noise,
        warm_start=settings.method.num_warm_start_steps,
    )  # fmt: skip
    return StartedRun(run, objective, prior, settings)


def _require_data_access(method: MethodConfig, data: DataAccess | None) -> None:
    """Check that a method that passes over rows by number has them."""
    needs = method.requirements
    if not (needs.final_pass or needs.heldout != "none"):
        return
    kind = "rows" if needs.heldout == "none" else "rows and held-out rows"
    if data is None or (needs.heldout != "none" and data.heldout is None):
        given = "no data=" if data is None else "data= without held-out rows"
        raise ValueError(
            f"{method.name} passes over {kind} by number, got {given}: give a DataAccess to them (docs/own_loop.md)"
        )


def problem_for(
    model: BayesianModel,
    prior: Prior,
    num_data: float,
    *,
    num_steps: int = 1,
    most_terms: int | None = None,
    batch_fraction: float | None = None,
    update_fraction: float | None = None,
    seed: int,
) -> Problem:
    """Return the problem of a run on a model, before its learning rate and its draws are settled.

    Args:
        model: an attached model.
        prior: log p(theta).
        num_data: N, the number of likelihood terms that the data count as.
        most_terms: as for ``likelihood_facts``.
        num_steps, batch_fraction, update_fraction, seed: fields of ``Problem``.
    """
    return Problem(
        num_data=num_data, prior=prior, learning_rate=1.0, num_steps=num_steps, burn_in=0,
        shapes=model.layout.named_shapes, batch_fraction=batch_fraction,
        update_fraction=update_fraction, likelihood=likelihood_facts(model, most_terms), seed=seed,
    )  # fmt: skip


def likelihood_facts(model: BayesianModel, most_terms: int | None = None) -> LikelihoodFacts:
    """Return the facts about the likelihood of a model.

    Args:
        most_terms: the number of likelihood terms in the row with most of them, if they were counted.
    """
    own = model.likelihood
    return LikelihoodFacts(most_terms, model.num_root_columns, own.noise_std, own.lacks)


def _trial(
    passes: MemberPasses,
    scale: DataScale,
    start: Tensor,
    problem: Problem,
    updates: Callable[[], Iterable[list[Any]]],
    method: MethodConfig,
    *,
    progress: bool,
) -> TryRates:
    """Return the function that tries learning rates, one member for each rate, on the same rows."""

    def trial(adamw_steps: int) -> RangeTest:
        plan = plan_for(method, problem.num_steps)
        objective = ModelObjective(replace(passes, chains=range(len(plan.rates)), shared=True), scale)
        return range_test(
            objective, start, problem, updates(), plan=plan, num_steps=adamw_steps,
            prior_weight=method.prior_weight, progress=progress,
        )  # fmt: skip

    return trial


def _with_settings(problem: Problem, settings: Settings, *, has_rows: bool) -> Problem:
    """Return the problem with the steps and the learning rate of the settings."""
    own = settings.learning_rate is None
    if own and not has_rows:
        raise ValueError(
            f"{settings.method.name} without a learning rate finds its step size by a pass over rows by number, and "
            "there are none (an iterable data set has none): give learning_rate"
        )
    steps = _steps_of(settings.method, problem.num_steps)
    return problem._replace(**steps, own_step_size=own, learning_rate=settings.learning_rate or 1.0)


def _steps_of(method: MethodConfig, num_steps: int) -> dict[str, Any]:
    """Return the updates of burn-in, and the updates after which draws are taken, as fields of ``Problem``."""
    burn_in = max(burn_in_steps(method.burn_in, num_steps), method.num_warm_start_steps)
    draws = draw_steps(num_steps, burn_in=burn_in, draws=method.draws_per_chain, thin=method.thin)
    return {"burn_in": burn_in, "draw_steps": draws}


def _needs_of(method: MethodConfig, built: Rule[Any] | Kernel[Any], problem: Problem) -> dict[str, Any]:
    """Return the evaluations that a method needs, as arguments of ``ModelObjective``."""
    exact, needs = built.is_exact, method.requirements
    return {
        "in_float64": exact,
        "returns_batches": exact and not needs.all_data_in_every_update,
        # a whitened chain measures the noise itself, in its own coordinates
        "measures_noise": needs.gradient_variance != "none" and not problem.own_step_size,
    }
