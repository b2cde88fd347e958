"""Answer or abstain: a threshold of a classifier's uncertainty, stored with its posterior and used by its pipelines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_bayes.decide.threshold import fit_threshold
from hf_bayes.fit.finished_models import check_rows_and_batch_size, labelled_batches
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.posterior import read
from hf_bayes.models.predictors import Predictive
from hf_bayes.posteriors.abstention import CLASS_MEASURES, Abstention
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.likelihoods import Likelihood, widened


def fit_abstention(
    posterior: Posterior | str | os.PathLike[str],
    heldout: Any,
    *,
    error_rate: float,
    measure: str = "total",
    failure_rate: float = 0.1,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    base_model: Any = None,
    prediction: str | None = None,
    members: int | None = None,
) -> Posterior:
    """Return the posterior of a classifier with a threshold, above which its pipelines abstain.

    ``decide.threshold`` explains the promise. ``save_pretrained`` stores the threshold.

    Args:
        posterior: a posterior, its directory or its repository on the Hub.
        heldout: rows with labels that were used neither in training nor for a temperature, in random order.
        error_rate: the largest error rate among answered rows.
        measure: one of ``CLASS_MEASURES``.
        failure_rate: the largest probability that the promise does not hold.
        collate, batch_size: as in ``fit_calibration``. Weights of rows are not used: each row counts once.
        base_model, prediction, members: as in ``from_pretrained``. A threshold belongs to one way of prediction, one
            number of members and one temperature.
    Raises:
        ValueError: as ``fit_threshold``, and for a model whose inputs do not have one class each.
    """
    if measure not in CLASS_MEASURES:
        raise ValueError(f"unknown measure {measure!r}: expected one of {', '.join(CLASS_MEASURES)}")
    check_rows_and_batch_size("fit_abstention", "heldout", heldout, batch_size)
    loaded = read(posterior)
    if not loaded.config.task.endswith("_classification") or loaded.config.task == "token_classification":
        raise ValueError(
            f"fit_abstention needs a classifier of whole inputs, got a posterior for {loaded.config.task}: score "
            "held-out answers, and give fit_threshold their uncertainties and errors"
        )
    kind = MODELS[loaded.config.task]
    with kind.from_pretrained(loaded, base_model=base_model, prediction=prediction, members=members) as model:
        if not model.likelihood.predicts_classes:
            raise ValueError(
                f"fit_abstention needs one class for each input, got a {model.likelihood.name} likelihood: "
                "give fit_threshold uncertainties and losses of your own"
            )
        found = [
            model.read_predictions(batch, _judged(measure, model.likelihood))[0]
            for batch in labelled_batches(heldout, model=model, collate=collate, batch_size=batch_size)
        ]
        columns = {name: torch.cat([part[name] for part in found]) for name in ("uncertainty", "error")}
        rule = fit_threshold(
            columns["uncertainty"].numpy(), columns["error"].numpy(),
            error_rate=error_rate, failure_rate=failure_rate, measure=measure,
        )  # fmt: skip
        return with_abstention(loaded, dataclasses.replace(rule, **_origin(model)))


def with_abstention(posterior: Posterior, rule: Abstention) -> Posterior:
    """Return the posterior with a threshold of its answers, in place of an earlier one."""
    return dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, abstention=rule.to_dict()))


def rule_for(model: BayesianModel, abstain: bool | Abstention, measures: Collection[str]) -> Abstention | None:
    """Return the threshold that a pipeline uses; None for False.

    Args:
        abstain: True for the threshold that is stored with the model's posterior, or a threshold.
        measures: the uncertainties that the pipeline computes.
    Raises:
        ValueError: if no threshold is stored, or it belongs to another measure, prediction, number of members or
            temperature.
    """
    if abstain is False:
        return None
    if isinstance(abstain, Abstention):
        rule = abstain
    elif abstain is True:
        stored = {} if model.posterior is None else model.posterior.config.abstention
        if not stored:
            raise ValueError(
                "abstain=True uses the threshold that is stored with the posterior, and none is stored: fit one with "
                "hf_bayes.fit_abstention, or give an Abstention"
            )
        rule = Abstention.from_dict(stored)
    else:
        raise ValueError(f"abstain must be True, False or an Abstention, got {abstain!r:.100}")
    if rule.measure not in measures:
        raise ValueError(
            f"the threshold is of {rule.measure}, which this pipeline does not compute: expected one of "
            f"{', '.join(measures)}"
        )
    _require_origin(rule, model)
    return rule


def _origin(model: BayesianModel) -> dict[str, Any]:
    """Return the prediction, number of members and temperature that a threshold belongs to."""
    return {**model.predicted_by._asdict(), "temperature": model.mixture_temperature}


def _require_origin(rule: Abstention, model: BayesianModel) -> None:
    if rule.num_members is None:  # fitted to numbers whose origin is not known
        return
    for name, value in _origin(model).items():
        if getattr(rule, name) != value:
            raise ValueError(
                f"the threshold was fitted with {name}={getattr(rule, name)!r}, and the model has {value!r}: its "
                "promise does not hold here. Load the posterior as it was, or fit the threshold again"
            )


def class_uncertainty(log_probs: Tensor, parts: Mapping[str, Tensor], measure: str) -> Tensor:
    """Return an uncertainty [...] of a class in float64, on the CPU.

    A fit and a pipeline both call this function. Rounded in two ways, rows exactly at the threshold would be answered
    in the fit, and withheld in the pipeline.

    Args:
        log_probs: [..., C] of the mixture.
        parts: name -> [...] uncertainties that the prediction defines.
        measure: one of ``CLASS_MEASURES``.
    Raises:
        ValueError: if the prediction does not define the measure.
    """
    if measure == "one_minus_confidence":
        return 1 - widened(log_probs).amax(-1).cpu().double().exp()
    if measure not in parts:
        raise ValueError(f"this prediction does not define {measure}: choose another measure, or predict by members")
    return parts[measure].cpu().double()


def _judged(measure: str, likelihood: Likelihood) -> Callable[[Predictive, Tensor], dict[str, Tensor]]:
    def read_row(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
        values = class_uncertainty(found.logits, found.parts, measure)
        return {
            "uncertainty": values[likelihood.is_term(labels).cpu()],
            "error": 1 - found.statistics(labels)["correct"].cpu().double(),
        }

    return read_row
