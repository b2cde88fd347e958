"""The held-out metrics of a finished posterior, and its comparison with a MAP estimate."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

from hf_bayes.diagnostics.comparison import difference_std_error
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.calibrating import calibrate, most_rows
from hf_bayes.training.evaluation import EvaluationResult, Evaluator
from hf_bayes.training.map_comparison import compare, map_of_run

KEPT_METRICS = (
    "nll", "accuracy", "ece", "brier", "total", "aleatoric", "epistemic", "member_nll", "perplexity", "ace", "mse",
    "predictive_std", "epistemic_std",
)  # fmt: skip
"""Metrics of an evaluation that are saved with the posterior."""


class HeldOutEvaluation(NamedTuple):
    """An evaluation of the finished posterior on the trainer's own eval_dataset.

    Attributes:
        evaluations: the evaluation of each data set, by metric prefix.
        limit: the limit of an infinite ensemble; None if the approximation is not draws.
    """

    evaluations: dict[str, EvaluationResult]
    limit: dict[str, Any] | None


def heldout_evaluation(posterior: Posterior, evaluator: Evaluator) -> HeldOutEvaluation:
    """Return the evaluation that has just ended, with the limit of an infinite ensemble.

    Args:
        posterior: the posterior that was evaluated.
        evaluator: the evaluator, with the numbers of the evaluation.
    """
    mirrored = bool(posterior.config.diagnostics.get("mirrored"))
    limit = evaluator.ensemble_limit(evaluator.latest, posterior.approximation, mirrored=mirrored)
    return HeldOutEvaluation(evaluator.last, limit)


def with_heldout_metrics(
    posterior: Posterior, active: ActiveRun, evaluator: Evaluator, heldout: HeldOutEvaluation
) -> Posterior:
    """Return the posterior with its held-out metrics, and with the NLL of a MAP estimate, which is evaluated here.

    A data set without a likelihood term has no metrics, and is warned of. If there is no other data set, the posterior
    stays as it is.

    Args:
        posterior: the finished posterior.
        active: the run that has made it.
        evaluator: the evaluator of the trainer, which holds the rows of the MAP estimate afterwards.
        heldout: the evaluation of the posterior.
    """
    sets = [f"{name}_" if name else "" for name in active.host.eval_sets]
    # the evaluator's own numbers: compute_metrics may return others under the same names
    metrics = {name: heldout.evaluations[f"eval_{name}"[:-1]].metrics for name in sets}
    if empty := [name for name in sets if "nll" not in metrics[name]]:
        active.host.warn(
            "no likelihood term in eval_dataset%s, so the posterior is saved without its metrics: it has no row "
            "(dataloader_drop_last leaves out a batch that is not full), no labels, or all of them are -100",
            "".join(f" {name[:-1]!r}" for name in empty if name),
        )
    sets = [name for name in sets if name not in empty]
    if not sets:
        return posterior
    found = {name + kept: metrics[name][kept] for name in sets for kept in KEPT_METRICS if kept in metrics[name]}
    nlls = {name: found[f"{name}nll"] for name in sets}
    found |= _beside_map(posterior, active, evaluator, heldout, nlls)
    last, limit, trace = sets[-1], heldout.limit, posterior.trace  # the set that was evaluated last
    if limit is not None:
        found |= {f"{last}limit_nll": limit["limit"], f"{last}limit_nll_std_error": limit["std_error"]}
        trace = {**(trace or {}), "risk": {**limit, "eval_set": last[:-1]} if last else limit}
    config = dataclasses.replace(posterior.config, metrics=found)
    return dataclasses.replace(posterior, config=config, trace=trace)


def _beside_map(
    posterior: Posterior,
    active: ActiveRun,
    evaluator: Evaluator,
    heldout: HeldOutEvaluation,
    nlls: dict[str, float],
) -> dict[str, float]:
    """Return the NLL of a MAP estimate on each data set, and the standard error of the difference.

    Args:
        nlls: the posterior's NLL in nats on each data set, by the data set's name with an underscore at its end; the
            name of an only data set is "".
    """
    rival, model, noise = None, active.setup.model, active.noise
    with nullcontext() if noise is None else noise.using(noise.of_run):
        point = map_of_run(posterior, active)
    if point is None:
        return {}
    point = active.with_batch_norm_statistics(point)
    if posterior.config.calibration:  # as for the posterior: what cannot be fitted has been said already
        with model.showing(point):
            rival = calibrate(active)
    with ExitStack() as stack:
        stack.enter_context(model.showing(point, temperature=1.0 if rival is None else rival.temperature))
        if noise is not None:
            found = noise.best_fit(most_rows(active))
            stack.enter_context(noise.using(None if found is None else found.noise_std))
        alone = active.host.measure("map")
    figures = {f"{name}map_nll": alone[f"map_{name}nll"] for name in nlls}
    for name, nll in nlls.items():
        of = f"_{name[:-1]}" if name else ""
        rows, map_rows = heldout.evaluations[f"eval{of}"].rows, evaluator.last[f"map{of}"].rows
        assert rows is not None
        assert map_rows is not None
        error = difference_std_error(rows, map_rows)
        figures |= {} if error is None else {f"{name}map_nll_difference_std_error": error}
        compare(active.host, name, nll, figures[f"{name}map_nll"], error, method=active.method)
    return figures
