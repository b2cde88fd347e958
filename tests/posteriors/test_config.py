from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from typing import Any

import pytest
import torch

from hf_bayes.metrics.calibration import Calibration
from hf_bayes.posteriors.config import CALIBRATION, PosteriorConfig, library_versions
from tests.faults.posteriors import config

CALIBRATED = {
    "temperature": 0.7, "log_std_error": 0.02, "nll": 0.65, "calibrated_nll": 0.64, "nll_std_error": 0.01,
    "num_terms": 500, "num_members": 2, "prediction": "members",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "translation"}, "task must be one of causal_lm, sequence_classification"),
        ({"num_members": 0}, "0 members"),
        ({"prediction": "linearised"}, 'prediction must be one of members for draws, got "linearised"'),
        ({"prediction": 1}, "prediction must be one of members for draws, got 1"),
        ({"num_members": True}, "num_members must be an integer"),
        ({"method": {}}, "method's name"),
        ({"parameters": []}, "parameters must be"),
        ({"parameters": [["w", [0]]]}, "parameters must be"),
        ({"parameters": [["w", [1]], ["w", [1]]]}, "each name once"),
        ({"num_data": -1.0}, "num_data must be a number > 0"),
        ({"num_data": float("nan")}, "num_data must be finite"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be an integer from 0 to 18446744073709551615"),
        ({"base_model": {"name_or_path": "x"}}, "base_model must be the keys"),
        ({"base_model": {**config().base_model, "dtype": "float99"}}, r"base_model: dtype must be .*, got \"float99\""),
        ({"base_model": {**config().base_model, "dtype": "nn"}}, r"base_model: dtype must be .*, got \"nn\""),
        ({"diagnostics": {"converged": "yes"}}, "converged must be true, false or null"),
        ({"member_chains": [0]}, "member_chains must be"),
        ({"prior": {"x": object()}}, r"prior\.x holds a object"),
        ({"calibration": {"temperature": 0.5}}, "calibration must be the keys"),
        ({"calibration": {**CALIBRATED, "temperature": 0.0}}, r"calibration\.temperature must be > 0, got 0"),
        ({"calibration": {**CALIBRATED, "nll": "low"}}, r'calibration\.nll must be a number, got "low"'),
        ({"calibration": {**CALIBRATED, "num_terms": -1}}, r"calibration\.num_terms must be an integer >= 0"),
        ({"calibration": {**CALIBRATED, "prediction": "votes"}}, r"calibration\.prediction must be one of members"),
        ({"abstention": {"threshold": 0.5}}, "abstention must be the keys"),
        ({"abstention": []}, "abstention must be an object"),
    ],
)
def test_config_values_that_mean_nothing_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("key", config().to_dict())
def test_config_values_of_any_type_never_crash(key: str) -> None:
    for value in (None, True, 0, -1, 2**70, 0.5, "", "x", [], [[]], [1], ["x"], [["x", "y"]], {}, {"x": [{}]}):
        with contextlib.suppress(ValueError):
            made = PosteriorConfig.from_dict({**config().to_dict(), key: value})
            assert made == PosteriorConfig.from_dict(made.to_dict())


def test_the_keys_of_a_calibration_are_its_fields() -> None:
    assert set(CALIBRATION) == {field.name for field in dataclasses.fields(Calibration)}
    assert config(calibration=CALIBRATED).calibration == CALIBRATED


def test_config_keys_are_exactly_known() -> None:
    values = config().to_dict()
    assert PosteriorConfig.from_dict(values) == config()
    with pytest.raises(ValueError, match=r"missing keys \['prior'\], unknown keys \['priors'\]"):
        PosteriorConfig.from_dict({**{k: v for k, v in values.items() if k != "prior"}, "priors": {}})
    with pytest.raises(ValueError, match="format_version is 2, this version of hf_bayes reads 1"):
        PosteriorConfig.from_dict({**values, "format_version": 2})


def test_config_takes_the_types_that_code_holds() -> None:
    made = config(parameters=[("w", torch.Size([2]))], metrics={"nll": torch.tensor(0.5)}, seed=3, num_members=1)
    assert made.parameters == [["w", [2]]]
    assert made.metrics == {"nll": 0.5}
    assert dataclasses.replace(made, seed=None).seed is None
    assert library_versions()["torch"] == importlib.metadata.version("torch")
