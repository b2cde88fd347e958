from __future__ import annotations

import inspect

import pytest
from evaluate import EvaluationModuleInfo, Metric

from hf_bayes.metrics.compat import HOOKS
from hf_bayes.metrics.evaluate_metrics import NLL


@pytest.mark.parametrize("name", HOOKS)
def test_evaluate_has_the_method_with_its_parameters(name: str) -> None:
    assert tuple(inspect.signature(getattr(Metric, name)).parameters) == HOOKS[name]


def test_evaluate_calls_what_a_metric_overrides() -> None:
    metric = NLL("tokens")
    assert isinstance(metric._info(), EvaluationModuleInfo)
    assert metric._feature_names() == ["nll"]
    assert metric.compute(nll=[1.0, 3.0]) == {"nll": 2.0}
