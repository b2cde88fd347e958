from __future__ import annotations

import pytest

from hf_bayes.posteriors.lora_keys import adapter_key, copied_key, parameter_name, partner_key

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


def test_biases_that_peft_stores_twice_are_recognised() -> None:
    assert copied_key("m.classifier.modules_to_save.bias") == "m.classifier.bias"
    assert copied_key("m.classifier.original_module.bias") == "m.classifier.bias"
    assert copied_key("m.classifier.bias") is None
