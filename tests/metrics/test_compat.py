from __future__ import annotations

import pytest
from evaluate import EvaluationModuleInfo

from hf_bayes.core.compat import PrivateName
from hf_bayes.metrics.compat import NAMES
from hf_bayes.metrics.evaluate_metrics import NLL
from tests.host_names import fault_of, label


@pytest.mark.parametrize("entry", NAMES, ids=label)
def test_evaluate_has_the_method_with_its_parameters(entry: PrivateName) -> None:
    assert fault_of(entry) == ""


def test_evaluate_calls_what_a_metric_overrides() -> None:
    metric = NLL("tokens")
    assert isinstance(metric._info(), EvaluationModuleInfo)
    assert metric._feature_names() == ["nll"]
    assert metric.compute(nll=[1.0, 3.0]) == {"nll": 2.0}
