from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest

from hf_bayes.core.config import MethodConfig, check_config
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.schedules import Cyclical
from hf_bayes.core.types import Problem
from hf_bayes.distributions.energy import FlatPrior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(MethodConfig):
    name: ClassVar[str] = "plain"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_chains", 0, "an integer >= 1, got 0"),
        ("draws_per_chain", True, "an integer >= 1, got True"),
        ("thin", 0, "an integer >= 1, got 0"),
        ("temperature", -0.5, "a finite number >= 0, got -0.5"),
        ("temperature", math.nan, "a finite number >= 0, got nan"),
        ("warm_start_learning_rate", 0.0, "a finite number > 0, got 0.0"),
        ("prior_std", 0.0, "a finite number > 0, got 0.0"),
        ("prior_std", {"w": -1.0}, "a finite number > 0, got -1.0"),
        ("prior", "cauchy", "one of gaussian, he, laplace, got 'cauchy'"),
        ("temper", "prior", "one of posterior, likelihood, got 'prior'"),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^plain: {field} must be {expected}$"):
        Plain(**{field: value})


def test_the_prior_is_weighted_if_the_likelihood_is_tempered() -> None:
    assert Plain(temperature=0.5, temper="likelihood").prior_weight == 0.5
    assert Plain(temperature=0.5, temper="posterior").prior_weight == 1.0


def test_a_schedule_may_be_a_mapping() -> None:
    config = Plain(schedule={"name": "cyclical", "ramp_up": 0.2})  # type: ignore[arg-type]
    assert config.schedule == Cyclical(ramp_up=0.2)
    with pytest.raises(ValueError, match="plain: schedule must be None, a Schedule or a mapping, got 3"):
        Plain(schedule=3)  # type: ignore[arg-type]


def test_a_dictionary_holds_the_name_and_every_field() -> None:
    values = Plain(num_chains=3).to_dict()
    assert values.keys() == {"name", *(field.name for field in dataclasses.fields(Plain))}
    assert (values["name"], values["num_chains"]) == ("plain", 3)


def test_the_base_class_is_no_method() -> None:
    config = Plain()
    assert config.requirements == Requirements()
    with pytest.raises(TypeError, match=r"Plain is not a method: use one of hf_bayes\.METHODS"):
        config.build(Problem(1.0, FlatPrior(), 0.1, num_steps=1, burn_in=0, shapes={"w": (1,)}))


@pytest.mark.parametrize("method", ["sgld", Plain, None])
def test_what_is_no_config_is_refused(method: object) -> None:
    check_config(Plain())
    with pytest.raises(ValueError, match=r"method must be a config, an instance of a class in hf_bayes\.METHODS, got "):
        check_config(method)
