"""The accepted LoRA configurations, and the full names of their modules."""

from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.posteriors.lora_config import checked, explicit, for_inference, from_tensors, patterns, shadowed

A, B = "base_model.model.m.0.q.lora_A.default.weight", "base_model.model.m.0.q.lora_B.default.weight"
SHAPES = {A: (2, 6), B: (4, 2), "base_model.model.score.modules_to_save.default.weight": (3, 4)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "modules_to_save": ["score"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config=.* is not supported"),
        ({"layer_replication": [[0, 2]] * 2000}, "layer_replication=.* is not supported"),
        ({"runtime_config": {"ephemeral_gpu_offload": True}}, "runtime_config=.* is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config=.* is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq' changes the base model's weights"),
        ({"init_lora_weights": "pissa_niter_999999999"}, "cannot be repeated"),
        ({"custom_pipelines": {}}, "'custom_pipelines' is not a field of a LoRA"),
        ({"r": 0}, "r must be an integer >= 1, got 0"),
        ({"r": True}, "r must be an integer >= 1, got True"),
        ({"lora_dropout": 1.5}, "lora_dropout must be a number from 0 to below 1"),
        ({"lora_alpha": -1}, "lora_alpha must be a number > 0"),
        ({"modules_to_save": "score"}, "modules_to_save must be a list of names"),
        ({"target_modules": ["x"] * 50_001}, "target_modules must be a list of module names"),
        ({"rank_pattern": {"q": "2"}}, "rank_pattern must be an object of module names and integers"),
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
    ],
)
def test_a_field_that_no_posterior_supports_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked({**CONFIG, **change})


def test_neutral_fields_are_kept_and_fields_naming_code_dropped() -> None:
    neutral = {"use_dora": False, "layer_replication": None, "loftq_config": {}, "megatron_config": None}
    naming = {"auto_mapping": {"parent_library": "evil"}, "megatron_core": "evil", "qalora_group_size": 16}
    assert checked({**CONFIG, **neutral, **naming}) == {**CONFIG, **neutral}


def test_explicit_names_every_module_and_is_idempotent() -> None:
    config = {**CONFIG, "alpha_pattern": {"0.q": 7}, "layers_to_transform": [0], "init_lora_weights": "gaussian"}
    found = explicit(config, SHAPES)
    assert (found["target_modules"], found["modules_to_save"]) == (["m.0.q"], ["score"])
    assert (found["alpha_pattern"], found["rank_pattern"], found["layers_to_transform"]) == ({"m.0.q": 7}, {}, None)
    assert found["init_lora_weights"] is True
    assert explicit(found, SHAPES) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_modules": r"(a+)+b"}, r"target_modules='\(a\+\)\+b' is a regular expression"),
        ({"exclude_modules": ".*"}, r"exclude_modules='\.\*' is a regular expression"),
        ({"layers_pattern": "(x+)+y"}, r"layers_pattern='\(x\+\)\+y' is a regular expression"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern holds '.*', which is a regular expression"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern holds '.*', which is a regular expression"),
        ({"modules_to_save": ["(a+)+b"]}, "modules_to_save holds '.*', which is a regular expression"),
        ({"r": 10**7}, r"r is 10000000 for m\.0\.q, whose tensors have rank 2"),
        ({"rank_pattern": {"0.q": 9}}, r"r is 9 for m\.0\.q, whose tensors have rank 2"),
        ({"target_modules": ["v"]}, r"factors of m\.0\.q, which target_modules does not name"),
    ],
)
def test_expressions_and_ranks_that_no_tensor_has_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explicit({**CONFIG, **change}, SHAPES)


def test_the_factors_of_a_module_have_one_rank() -> None:
    with pytest.raises(ValueError, match=r"the factors of m\.0\.q have ranks 2 and 3"):
        explicit(CONFIG, {**SHAPES, B: (4, 3)})


def test_adapter_tensors_show_what_its_expressions_matched() -> None:
    config = {**CONFIG, "target_modules": "(a+)+b", "exclude_modules": "(x+)+", "rank_pattern": {"(a|b)*q": 2}, "r": 9}
    found = from_tensors(config, SHAPES)
    assert (found["target_modules"], found["exclude_modules"]) == (["m.0.q"], None)
    assert found["rank_pattern"] == {"m.0.q": 2}
    with pytest.raises(ValueError, match=r"rank 2, expected one of \[9\]"):
        from_tensors({**config, "rank_pattern": {}}, SHAPES)
    with pytest.raises(ValueError, match=r"alpha_pattern holds '.*', which is a regular expression"):
        from_tensors({**config, "alpha_pattern": {".*q": 3}}, SHAPES)


def test_names_with_equal_endings_get_entries_longest_first() -> None:
    found = patterns({"b.q": 3, "a.b.q": 2, "c.q": 2, "q": 2}, 2)
    assert list(found.items()) == [("a.b.q", 2), ("b.q", 3)]
    assert shadowed(["b.q"], ["a.b.q", "ab.q", "b.q", "q"]) == ["a.b.q"]


def test_patterns_take_the_first_name_that_a_module_ends_in() -> None:
    for pattern, alpha in (({"q": 5, "0.q": 6}, 5), ({"0.q": 6, "q": 5}, 6), ({"x": 5}, None)):
        found = explicit({**CONFIG, "alpha_pattern": pattern}, SHAPES)
        assert found["alpha_pattern"] == ({} if alpha is None else {"m.0.q": alpha})


def test_adapter_config_must_be_a_lora() -> None:
    assert for_inference({"peft_type": "LORA", "target_modules": {"b", "a"}, "inference_mode": False}) == {
        "peft_type": "LORA",
        "target_modules": ["a", "b"],
        "inference_mode": True,
    }
    with pytest.raises(ValueError, match="peft_type must be LORA, got 'IA3'"):
        for_inference({"peft_type": "IA3"})
