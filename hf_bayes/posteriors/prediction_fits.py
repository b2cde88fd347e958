"""The fits to the predictions of a finished posterior. A fit is dropped as soon as its predictions change.

A posterior stores four fits: the factors of a single pass, a student, a temperature of the mixture, and a threshold of
answers. Each belongs to one way of prediction, and in this order each is fitted to predictions with the earlier ones:

| what changes | what is dropped |
|---|---|
| the draws or the Gaussian | all four, and the held-out figures |
| the factors | the student, the temperature and the threshold of the single pass |
| the student | the threshold of the student |
| the temperature | a threshold that was fitted at another temperature |

A threshold of unknown origin (``Abstention.num_members`` is None) may belong to any prediction of the posterior. It
cannot be checked, so it stays with new factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.student import DISTILLED
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS, SINGLE_PASS


def without_fits(posterior: Posterior, predictions: Collection[str]) -> Posterior:
    """Return the posterior without what was fitted to these ways of prediction.

    Args:
        predictions: names of ``PREDICTIONS``, or "distilled" for the threshold of a student. Without its student, the
            threshold is left out, too.
    """
    config = posterior.config
    if config.student.get("prediction") in predictions:
        predictions = (*predictions, DISTILLED)
    changes: dict[str, Any] = {
        name: {}
        for name in ("student", "calibration", "abstention")
        if getattr(config, name).get("prediction") in predictions
    }
    if config.abstention.get("num_members", 0) is None:
        changes.pop("abstention", None)
    if SINGLE_PASS in predictions:
        changes["layer_factors"] = {}
    student = None if "student" in changes else posterior.student
    return dataclasses.replace(posterior, config=dataclasses.replace(config, **changes), student=student)


def with_approximation(posterior: Posterior, approximation: Draws | Gaussian, **changes: Any) -> Posterior:
    """Return the posterior with other draws or another Gaussian over the same parameters.

    Args:
        changes: other fields of the config that change. ``num_members`` and ``member_chains`` are those of the draws.
    """
    plain = without_fits(posterior, PREDICTIONS)
    config = dataclasses.replace(
        plain.config, approximation=approximation.kind, num_members=approximation.num_stored,
        member_chains=approximation.chains, abstention={}, metrics={}, **changes,
    )  # fmt: skip
    trace = plain.trace and {name: part for name, part in plain.trace.items() if name != "risk"}  # of held-out rows
    return dataclasses.replace(plain, approximation=approximation, config=config, trace=trace)


def with_layer_factors(posterior: Posterior, factors: Mapping[str, float]) -> Posterior:
    """Return the posterior with these factors of a single pass, in place of earlier ones."""
    plain = without_fits(posterior, (SINGLE_PASS,))
    return dataclasses.replace(plain, config=dataclasses.replace(plain.config, layer_factors=dict(factors)))


def with_temperature(posterior: Posterior, calibration: Mapping[str, Any]) -> Posterior:
    """Return the posterior with this temperature of the mixture, in place of an earlier one.

    Args:
        calibration: ``metrics.calibration.Calibration.to_dict()``.
    """
    changes: dict[str, Any] = {"calibration": dict(calibration)}
    rule = posterior.config.abstention
    if rule and not _holds(rule, posterior.config, calibration):
        changes["abstention"] = {}
    return dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, **changes))


def _holds(rule: Mapping[str, Any], config: PosteriorConfig, after: Mapping[str, Any]) -> bool:
    """Return whether a threshold holds after the calibration of the config was replaced by another one."""
    if rule["num_members"] is None:  # of any prediction
        return _change(config.calibration) == _change(after)
    # a student takes the temperature of the prediction that it imitates
    tempered = config.student if rule["prediction"] == DISTILLED else rule
    way = tempered.get("prediction"), tempered.get("num_members")
    temperature = after["temperature"] if (after["prediction"], after["num_members"]) == way else 1.0
    return bool(rule["temperature"] == temperature)


def _change(calibration: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the temperature and the prediction that it changes; nothing where it changes none."""
    if calibration.get("temperature", 1.0) == 1:
        return ()
    return tuple(calibration[name] for name in ("temperature", "prediction", "num_members"))
