from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bayes.posteriors.storage.json_values import json_value


class Colour(enum.Enum):
    RED = "red"


def test_plain_turns_what_configs_hold_into_json_values() -> None:
    value: dict[str, Any] = {
        "set": {"b", "a"},
        "enum": Colour.RED,
        "tuple": (1, 2),
        "path": Path("a/b"),
        "numpy": np.float32(0.5),
        "double": np.float64(0.25),
        "flag": np.bool_(True),
        "tensor": torch.tensor([1, 2]),
        "dtype": torch.bfloat16,
    }
    expected = {
        "set": ["a", "b"],
        "enum": "red",
        "tuple": [1, 2],
        "path": "a/b",
        "numpy": 0.5,
        "double": 0.25,
        "flag": True,
        "tensor": [1, 2],
        "dtype": "bfloat16",
    }
    assert json_value(value, "config") == expected
    assert json.loads(json.dumps(json_value(value, "config"))) == expected
    assert type(json_value(np.float64(0.25), "config")) is float  # numpy's double is an instance of float


def test_plain_names_the_entry_that_is_no_data() -> None:
    with pytest.raises(ValueError, match=r"config\.a\[1\] holds a object"):
        json_value({"a": [1, object()]}, "config")
    with pytest.raises(ValueError, match=r"config\.a must be finite"):
        json_value({"a": float("nan")}, "config")
    assert json_value({"a": float("nan")}, "config", undefined_is_null=True) == {"a": None}


def test_values_that_are_nested_deep_are_refused_in_words() -> None:
    value: dict[str, Any] = {}
    value["a"] = [value]  # endless nesting
    with pytest.raises(ValueError, match="head nests lists and objects more than 64 deep"):
        json_value(value, "head")
