"""The metrics as ``evaluate.Metric``, with ``add``, ``add_batch``, ``compute`` and ``evaluate.combine``.

They work without the hub and without a network. ``config_name`` sets the kind of inputs. Metrics with the same
configuration share their inputs, so they can be combined:

* ``"classification"`` (default of NLL, ECE, Brier): ``predictions`` are class probabilities [N, C] (of the mixture),
  ``references`` are class indices [N].
* ``"tokens"`` (NLL, ECE, Brier): the statistics of ``per_row_statistics`` by keyword, ``nll=, confidence=, correct=,
  brier=``. A single metric takes only the statistics that it uses. This configuration is for language models, whose
  [N, V] probabilities do not fit in Arrow.
* ``"scores"`` (OODAUROC, RiskCoverage): ``predictions`` are uncertainties; higher means less sure. ``references`` are 1
  for out-of-distribution examples and 0 for in-distribution examples (OODAUROC), or losses such as 0/1 errors
  (RiskCoverage). RiskCoverage also takes ``"classification"`` (uncertainty 1 - confidence, loss 0/1) and ``"tokens"``
  (the same from ``confidence, correct``).

>>> import evaluate, torch
>>> from hf_bayes.metrics import ECE, NLL, Brier, per_row_statistics
>>> log_probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()  # [N, C], of N tokens
>>> labels = torch.tensor([0, 1])
>>> metrics = evaluate.combine([NLL("tokens"), ECE("tokens"), Brier("tokens")])
>>> metrics.add_batch(**per_row_statistics(log_probs, labels))
>>> {name: round(value, 3) for name, value in metrics.compute().items()}
{'nll': 0.511, 'ece': 0.35, 'brier': 0.37}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Features, Sequence, Value
from evaluate import EvaluationModuleInfo

from hf_bayes.metrics import functions
from hf_bayes.metrics.statistics import classification_statistics

if TYPE_CHECKING:

    class Metric:
        """The part of ``evaluate.Metric`` that is used here. The evaluate library has no type hints."""

        name: str
        config_name: str

        def __init__(self, config_name: str | None = None, **kwargs: Any) -> None: ...

        def _feature_names(self) -> list[str]: ...
else:
    from evaluate import Metric

# evaluate.combine(...).compute(**inputs) passes the inputs and options of all combined metrics to each metric.
_INPUTS_OF_ALL_METRICS = {"nll", "confidence", "correct", "brier", "num_bins"}


class _BayesianMetric(Metric):
    """A metric of per-example statistics. A subclass names the statistics and computes the metric.

    Attributes:
        statistics: the keywords of the "tokens" configuration.
        configurations: the configurations of the metric, the default first.
        options: the keyword options of ``compute``.
        summary: one line for evaluate's description.
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    configurations: ClassVar[tuple[str, ...]] = ("classification", "tokens")
    options: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]

    def __init__(self, config_name: str | None = None, **kwargs: Any) -> None:
        config_name = self.configurations[0] if config_name in (None, "default") else config_name
        if config_name not in self.configurations:
            raise ValueError(
                f"{type(self).__name__} has the configurations {', '.join(self.configurations)}; got {config_name!r}"
            )
        super().__init__(config_name, **kwargs)

    def _info(self) -> EvaluationModuleInfo:
        features = {
            "classification": {"predictions": Sequence(Value("float64")), "references": Value("int64")},
            "tokens": {name: Value("float64") for name in self.statistics},
            "scores": {"predictions": Value("float64"), "references": Value("float64")},
        }[self.config_name]
        inputs = ", ".join(features)
        return EvaluationModuleInfo(
            description=self.summary,
            citation="",
            inputs_description=f"\nInputs of configuration {self.config_name!r}: {inputs}.\n",
            features=Features(features),
            format=None if self.config_name == "classification" else "numpy",
        )

    def _compute(self, **inputs: Any) -> dict[str, float]:
        extra = {name: value for name, value in inputs.items() if name not in self._feature_names()}
        if unknown := extra.keys() - _INPUTS_OF_ALL_METRICS:
            raise ValueError(
                f"{self.name}: unknown input or option {', '.join(sorted(unknown))}; "
                f"configuration {self.config_name!r} takes {', '.join((*self._feature_names(), *self.options))}"
            )
        options = {name: value for name, value in extra.items() if name in self.options}
        if self.config_name == "tokens":
            return self._from_statistics(inputs, **options)
        if self.config_name == "scores":
            return self._from_scores(inputs["predictions"], inputs["references"], **options)
        return self._from_statistics(classification_statistics(inputs["predictions"], inputs["references"]), **options)

    def _from_statistics(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        raise AssertionError(f"{type(self).__name__} takes no {self.config_name}")

    def _from_scores(self, scores: Any, references: Any) -> dict[str, float]:
        raise AssertionError(f"{type(self).__name__} takes no scores")


class NLL(_BayesianMetric):
    """The mean of -log p(label) in nats: ``{"nll"}``."""

    statistics = ("nll",)
    summary = "Mean negative log-likelihood of the labels in nats."

    def _from_statistics(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        return {"nll": functions.negative_log_likelihood(statistics["nll"])}


class ECE(_BayesianMetric):
    """The expected calibration error: ``{"ece"}``; the number of bins is an option, ``compute(num_bins=15)``."""

    statistics = ("confidence", "correct")
    options = ("num_bins",)
    summary = "Expected calibration error of the predicted class, in bins of equal width."

    def _from_statistics(self, statistics: Mapping[str, Any], num_bins: int = 15) -> dict[str, float]:
        ece = functions.expected_calibration_error(statistics["confidence"], statistics["correct"], num_bins=num_bins)
        return {"ece": ece}


class Brier(_BayesianMetric):
    """The mean squared distance between probabilities and the label's one-hot vector, in [0, 2]: ``{"brier"}``."""

    statistics = ("brier",)
    summary = "Brier score, summed over classes: between 0 and 2."

    def _from_statistics(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        return {"brier": functions.brier(statistics["brier"])}


class OODAUROC(_BayesianMetric):
    """The area under the ROC curve of uncertainty as a detector of out-of-distribution examples: ``{"ood_auroc"}``."""

    configurations = ("scores",)
    summary = "Area under the ROC curve of an uncertainty as a detector of out-of-distribution examples."

    def _from_scores(self, scores: Any, references: Any) -> dict[str, float]:
        return {"ood_auroc": functions.ood_auroc(scores, references)}


class RiskCoverage(_BayesianMetric):
    """The area under the risk-coverage curve, and the risk at full coverage: ``{"aurc", "risk"}``."""

    statistics = ("confidence", "correct")
    configurations = ("scores", "classification", "tokens")
    summary = "Area under the risk-coverage curve: mean loss when only the least uncertain examples are answered."

    def _from_statistics(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        return self._from_scores(1 - np.asarray(statistics["confidence"]), 1 - np.asarray(statistics["correct"]))

    def _from_scores(self, scores: Any, references: Any) -> dict[str, float]:
        curve = functions.risk_coverage(scores, references)
        return {"aurc": curve.aurc, "risk": float(curve.risk[-1])}
