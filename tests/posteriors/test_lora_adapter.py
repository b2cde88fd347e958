from __future__ import annotations

import pytest

from hf_bayes.posteriors.lora_adapter import Adapter
from hf_bayes.posteriors.lora_config import for_inference
from hf_bayes.posteriors.lora_keys import adapter_key, parameter_name, partner_key
from hf_bayes.posteriors.tasks import PEFT_TASK_TYPES

KEYS = {
    "m.q_proj.lora_A.default.weight": "m.q_proj.lora_A.weight",
    "m.q_proj.lora_B.default.weight": "m.q_proj.lora_B.weight",
    "m.q_proj.lora_B.default.bias": "m.q_proj.lora_B.bias",
    "m.embed.lora_embedding_A.default": "m.embed.lora_embedding_A",
    "m.classifier.modules_to_save.default.weight": "m.classifier.weight",
    "m.classifier.modules_to_save.default.dense.bias": "m.classifier.dense.bias",
    "m.q_proj.base_layer.bias": "m.q_proj.base_layer.bias",
}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_parameter_names_become_keys_and_come_back(name: str, key: str) -> None:
    assert adapter_key(name) == key
    assert parameter_name(key, ["classifier", "score"]) == name


def test_the_adapter_s_name_does_not_matter_to_the_key() -> None:
    assert adapter_key("m.q_proj.lora_A.chain_3.weight") == "m.q_proj.lora_A.weight"


def test_factors_know_their_partner() -> None:
    assert partner_key("m.q.lora_A.weight") == "m.q.lora_B.weight"
    assert partner_key("m.q.lora_B.weight") == "m.q.lora_A.weight"
    assert partner_key("m.e.lora_embedding_B") == "m.e.lora_embedding_A"
    assert partner_key("m.q.lora_B.bias") is None
    assert partner_key("m.classifier.weight") is None


def test_adapter_config_must_be_a_lora() -> None:
    assert for_inference({"peft_type": "LORA", "target_modules": {"b", "a"}, "inference_mode": False}) == {
        "peft_type": "LORA",
        "target_modules": ["a", "b"],
        "inference_mode": True,
    }
    with pytest.raises(ValueError, match="peft_type must be LORA, got 'IA3'"):
        for_inference({"peft_type": "IA3"})


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours, theirs in PEFT_TASK_TYPES.items() if theirs])
def test_peft_s_name_of_a_task_is_translated(ours: str, theirs: str) -> None:
    assert Adapter("here", {"task_type": theirs}, {}, {}, None).task() == ours


@pytest.mark.parametrize("theirs", [None, "QUESTION_ANS"])
def test_a_task_without_a_name_is_asked_for(theirs: str | None) -> None:
    with pytest.raises(ValueError, match=r"pass task= one of causal_lm, .*image_classification"):
        Adapter("here", {"task_type": theirs}, {}, {}, None).task()
