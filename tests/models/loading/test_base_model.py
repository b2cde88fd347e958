from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_bayes.core.layout import Layout, select
from hf_bayes.models.loading.base_model import (
    adapter_config,
    describe,
    describe_head,
    differences,
    fingerprint_tokenizer,
    head_differences,
    head_settings,
    label_names,
    warn_of_resized_base,
)
from tests.members.reference import core_of
from tests.tiny_models import TEXTS, tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora


def described(model: nn.Module, subspace: str = "trainable", tokenizer: Any = None) -> dict[str, Any]:
    return describe(model, core_of(model), select(model, subspace), tokenizer)


# -- fingerprints ----------------------------------------------------------------------------------------------------


# -- which model ----------------------------------------------------------------------------------------------------


def test_a_base_that_was_resized_in_memory_is_warned_of(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_resized_base(base, base)
        warn_of_resized_base(tiny_llama(), tiny_llama())  # of no folder
    base.resize_token_embeddings(base.config.vocab_size + 1)
    adapted = with_lora(base)
    with pytest.warns(UserWarning, match=rf"base model has \d+ tokens, and '{tmp_path}/base' has \d+: it was resized"):
        warn_of_resized_base(adapted, core_of(adapted))


def test_a_model_is_described_by_name_dtype_and_fingerprints() -> None:
    found = described(tiny_llama(dtype=torch.bfloat16), "last_block", tiny_tokenizer())
    assert (found["dtype"], found["revision"], found["name_or_path"]) == ("bfloat16", None, "")
    assert all(len(value) == 64 for value in found["fingerprint"].values())
    json.dumps(found)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def test_adapters_leave_the_fingerprint_of_their_base(make: Callable[..., PreTrainedModel]) -> None:
    base = make()
    plain = describe(base, base, Layout((), ()))["fingerprint"]
    assert [described(with_lora(make(), seed=seed))["fingerprint"] for seed in (0, 1)] == [plain, plain]


def test_the_fingerprint_covers_buffers_that_are_saved() -> None:
    found = []
    for value in (0.0, 1.0):
        for stored in (True, False):
            model = tiny_llama()
            model.model.norm.register_buffer("shift", torch.full((2,), value), persistent=stored)
            found.append(described(model, "last_layer")["fingerprint"]["weights"])
    assert found[0] != found[2]  # as the bias of a router
    assert found[1] == found[3] == described(tiny_llama(), "last_layer")["fingerprint"]["weights"]


def test_the_fingerprint_covers_frozen_values_only() -> None:
    model = tiny_llama()
    before = described(model, "last_layer")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert differences(before, described(model, "last_layer")) == []
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    (problem,) = differences(before, described(model, "last_layer"))
    assert problem.startswith("other weights (weights fingerprint ")


def test_a_fresh_saved_head_is_nobodys() -> None:
    first, second = (with_lora(tiny_bert(), modules_to_save=["classifier"]) for _ in range(2))
    core_of(second).classifier.original_module.weight.data.mul_(2)
    assert differences(described(first), described(second)) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: tiny_llama(seed=1), ["other weights"]),
        (lambda: tiny_llama(num_hidden_layers=3), ["other weights", "another architecture or configuration"]),
        (lambda: tiny_llama(vocab_size=321), ["other weights", "another architecture or configuration"]),
        (
            lambda: tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
            ["another architecture or conf"],
        ),
        (lambda: tiny_llama(dtype=torch.bfloat16), ["dtype bfloat16 where", "other weights"]),
        (lambda: tiny_llama(pad_token_id=3, attn_implementation="eager"), []),
    ],
    ids=["weights", "layers", "vocabulary", "rope", "dtype", "settings of a run"],
)
def test_differences_say_what_is_another(other: Callable[[], nn.Module], words: list[str]) -> None:
    problems = differences(described(tiny_llama(), "last_block"), described(other(), "last_block"))
    assert len(problems) == len(words), problems
    assert all(problem.startswith(word) for problem, word in zip(problems, words, strict=True))


def test_another_tokenizer_differs_and_padding_does_not() -> None:
    tokenizer = tiny_tokenizer()
    same, other = tiny_tokenizer(padding_side="left"), tiny_tokenizer(texts=[text.upper() for text in TEXTS])
    same(["a", "bc"], padding=True, truncation=True, max_length=4)
    assert fingerprint_tokenizer(same) == fingerprint_tokenizer(tokenizer)
    model = tiny_llama()
    (problem,) = differences(described(model, ".", tokenizer), described(model, ".", other))
    assert problem.startswith("another tokenizer (tokenizer fingerprint ")
    assert differences(described(model, "."), described(model, ".", other)) == []  # none was recorded


# -- heads and adapters ---------------------------------------------------------------------------------------------


def test_the_settings_of_a_head_survive_a_round_trip() -> None:
    model = tiny_bert(num_labels=2, problem_type="single_label_classification", id2label={0: "no", 1: "yes"})
    head = describe_head(model, None)
    assert head == {"problem_type": "single_label_classification", "pad_token_id": 0, "labels": ["no", "yes"]}
    assert head_settings(json.loads(json.dumps(head)))["id2label"] == {0: "no", 1: "yes"}
    assert describe_head(tiny_bert(num_labels=1), 0.5)["noise_std"] == 0.5
    assert "labels" not in describe_head(tiny_llama(), None)


@pytest.mark.parametrize(
    "names",
    [{"0": "no", "1": "yes"}, {1: "yes", 0: "no"}, {np.int64(0): "no", np.int64(1): "yes"}, ["no", "yes"]],
    ids=["text keys", "another order", "numpy keys", "list"],
)
def test_labels_are_numbered_as_a_user_may_write_them(names: Any) -> None:
    model = tiny_bert(num_labels=2)
    model.config.id2label = names
    head = describe_head(model, None)
    assert (head["labels"], head_differences(head, model.config)) == (["no", "yes"], [])


def test_labels_that_are_numbers_become_texts() -> None:
    config = tiny_bert(num_labels=3).config
    config.id2label = {0: 5, 1: np.int64(7), 2: 0.5}
    assert label_names(config) == ["5", "7", "0.5"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({1: "a", 2: "b"}, r"the keys \[1, 2\], expected 0 to 1, one for each output: number the labels from 0"),
        ({"a": 0, "b": 1}, r"the keys \['a', 'b'\], expected 0 to 1"),
        ({"0": "a", 0: "b"}, r"the keys \['0', 0\], expected 0 to 1"),
        ({0: "a", 1: None}, r"the name None of output 1, expected a text or a number"),
        ({0: ("a",), 1: "b"}, r"the name \('a',\) of output 0, expected a text or a number"),
    ],
)
def test_labels_without_a_number_or_a_name_are_refused(names: Any, words: str) -> None:
    config = tiny_bert(num_labels=2).config
    config.id2label = names
    with pytest.raises(ValueError, match=words):
        label_names(config)


def test_a_special_token_below_zero_is_none() -> None:
    model = tiny_llama()
    model.config.pad_token_id = -1  # as in the configs of the first LLaMA
    assert "pad_token_id" not in describe_head(model, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem_type": "multi_label_classification"}, "'multi_label_classification', expected 'single_label"),
        ({"id2label": {0: "yes", 1: "no"}}, "['yes', 'no'], expected ['no', 'yes']"),
        ({"pad_token_id": None}, "pad_token_id None, expected 0"),
    ],
)
def test_a_config_that_reads_outputs_in_another_way_is_told(change: dict[str, Any], words: str) -> None:
    model = tiny_bert(num_labels=2, id2label={0: "no", 1: "yes"})
    head = describe_head(model, None)
    assert head_differences(head, model.config) == []
    assert head_differences({**head, "problem_type": "single_label_classification"}, model.config) == []
    assert head_differences(head, tiny_bert(num_labels=2).config) == []  # its labels have no names
    assert head_differences(describe_head(tiny_bert(num_labels=2), None), model.config) == []
    assert head_differences(describe_head(tiny_bert(num_labels=3), None), model.config) != []
    for name, value in change.items():
        setattr(model.config, name, value)
    (problem,) = head_differences(head, model.config)
    assert words in problem


def test_adapter_config_is_what_peft_would_write_by_full_names(tmp_path: Path) -> None:
    model = with_lora(tiny_llama(), use_rslora=True)
    model.save_pretrained(tmp_path)
    expected = json.loads((tmp_path / "adapter_config.json").read_text())
    layers = [f"model.layers.{i}." for i in range(2)]
    names = sorted(
        layer + name for layer in layers for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    )
    inert = ("auto_mapping", "megatron_core", "qalora_group_size", "eva_config")  # peft's defaults, and nothing else
    kept = {key: value for key, value in expected.items() if key not in inert}
    assert adapter_config(model) == {**kept, "target_modules": names}
    assert model.peft_config["default"].inference_mode is False
    assert isinstance(model.peft_config["default"], LoraConfig)
    assert adapter_config(tiny_llama()) is None


def test_numbers_of_numpy_are_numbers_of_an_adapter() -> None:
    given = {"lora_dropout": np.float64(0.0), "lora_alpha": np.float64(4), "alpha_pattern": {"q_proj": np.float32(2)}}
    found = adapter_config(with_lora(tiny_llama(), **given))
    assert found is not None
    assert (found["lora_dropout"], found["lora_alpha"], *set(found["alpha_pattern"].values())) == (0.0, 4.0, 2.0)


def test_an_adapter_that_no_posterior_holds_is_named() -> None:
    with pytest.raises(ValueError, match="the adapter of this model: lora_alpha must be a number > 0, got 0"):
        adapter_config(with_lora(tiny_llama(), lora_alpha=0))
