"""Every config survives JSON, is frozen, and refuses bad values by their field."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import RobbinsMonro
from hf_bayes.methods.registry import from_dict
from tests.methods.conformance import Row, rows


def changed(row: Row) -> MethodConfig:
    return dataclasses.replace(
        row.config,
        prior="he",
        prior_std={"lora_A": 0.5, "lora_B": 2.0},
        prior_mean="initial",
        temper="likelihood",
        burn_in=30,
        thin=2,
        init_jitter=0.3,
        schedule=RobbinsMonro(offset=9.0),
        warm_start_steps=3,
        warm_start_learning_rate=0.02,
    )


@rows
def test_a_config_survives_json(row: Row) -> None:
    for config in (row.config, changed(row)):
        restored = from_dict(json.loads(json.dumps(config.to_dict())))
        assert restored == config
        assert type(restored) is type(config)


BAD = {
    "num_chains": [0, -1, 1.5, "2", True, None],
    "draws_per_chain": [0, -1, 1.5],
    "burn_in": [-1, math.nan, math.inf, "half"],
    "thin": [0, -2, 1.5],
    "prior_std": [0, -1.0, math.nan, "wide", {"lora": 0.0}],
    "prior": ["cauchy", None],
    "prior_mean": ["base", 0.0],
    "temperature": [-1.0, math.nan, math.inf, "cold", True],
    "temper": ["prior", None],
    "init_jitter": [-0.1, math.nan],
    "schedule": ["cosine", 3, {"name": "staircase"}],
    "warm_start_steps": [-1, 1.5],
    "warm_start_learning_rate": [0.0, -1e-3, math.nan],
}


@rows
@pytest.mark.parametrize("field", BAD)
def test_bad_config_values_are_refused_by_field_and_value(row: Row, field: str) -> None:
    for value in BAD[field]:
        shown = re.escape(repr(next(iter(value.values())) if isinstance(value, dict) else value))
        with pytest.raises(ValueError, match=rf"{field} must be .*got {shown}"):
            from_dict({**row.config.to_dict(), field: value})


@rows
def test_configs_are_frozen_and_keyword_only(row: Row) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.config.num_chains = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        type(row.config)(4)  # type: ignore[call-arg]


@rows
def test_an_unknown_field_is_refused_with_the_fields_there_are(row: Row) -> None:
    with pytest.raises(ValueError, match=r"has no field 'num_chain': its fields are .*num_chains"):
        from_dict({**row.config.to_dict(), "num_chain": 3})
