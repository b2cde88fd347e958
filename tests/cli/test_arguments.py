from __future__ import annotations

import warnings

import pytest
from peft import TaskType
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.cli.arguments import MethodArguments, ModelArguments, method_config
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.tiny_models import tiny_gpt2


@pytest.mark.parametrize("fields", ['{"num_chains": 3, "prior_std": 0.5}', {"num_chains": 3, "prior_std": 0.5}])
def test_a_method_is_its_name_and_fields(fields: str | dict) -> None:
    assert method_config("sghmc", fields) == SGHMCConfig(num_chains=3, prior_std=0.5)
    assert method_config("sghmc") == SGHMCConfig()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("sgmc", None, "unknown method 'sgmc'"),
        ("sghmc", "num_chains=3", "must be JSON"),
        ("sghmc", "[3]", "must be a mapping"),
        ("sghmc", '{"chains": 3}', "has no field 'chains'"),
        ("sghmc", '{"num_chains": 0}', "num_chains must be an integer >= 1"),
    ],
)
def test_a_method_that_does_not_exist_is_refused(name: str, fields: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_config(name, fields)


def test_without_a_method_the_trainer_chooses() -> None:
    assert MethodArguments().config() is None
    assert not MethodArguments().compares
    assert MethodArguments(method="auto", budget=100).compares
    assert isinstance(MethodArguments(method="map").config(), MAPConfig)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method_args": {"num_chains": 2}}, "are fields of a method: name it with --method, or leave them out"),
        ({"method": "auto", "method_args": {"num_chains": 2}}, "are fields of a method: name it with --method"),
        ({"budget": 100}, "--budget=100 is for --method auto, got no --method"),
        ({"method": "map", "budget": 100}, "--budget=100 is for --method auto, got --method map"),
    ],
)
def test_settings_that_belong_to_no_method_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MethodArguments(**fields).config()


@pytest.mark.parametrize("targets", [None, ["c_attn", "lm_head"]])
def test_a_lora_on_transposed_weights_is_no_warning(targets: list[str] | None) -> None:
    given = ModelArguments("gpt2", lora_targets=targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fan_in_fan_out")
        model = given.add_lora(tiny_gpt2(), TaskType.CAUSAL_LM)
    layers = {type(layer.base_layer): layer.fan_in_fan_out for layer in model.modules() if isinstance(layer, LoraLayer)}
    assert layers == {Conv1D: True} | ({} if targets is None else {nn.Linear: False})
