from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import TaskType
from safetensors.torch import load_file, save_file

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, ModelArguments
from hf_bayes.cli.language_model import TrainingWindowArguments, language_model
from hf_bayes.cli.scripts import ModelAndData
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

InputsOf = Callable[[TrainingWindowArguments], ModelAndData]


@pytest.fixture
def inputs_of(tmp_path: Path) -> InputsOf:
    """A model with a context of 128 tokens, and a text."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 20))
    model, data = ModelArguments(str(tmp_path / "llama"), lora_rank=2), DataArguments(str(tmp_path / "book.txt"))
    args = BayesianTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    return lambda windows: language_model(model, data, windows, args)


def test_windows_overlap_by_half(inputs_of: InputsOf) -> None:
    found = inputs_of(TrainingWindowArguments(window=32))
    first, second = found.train_dataset[0], found.train_dataset[1]
    assert first["input_ids"][16:] == second["input_ids"][:16]
    assert len(found.eval_dataset) > 0
    assert sum(parameter.requires_grad for parameter in found.model.parameters()) == 8  # A and B of two layers, twice


@pytest.mark.parametrize(("subspace", "rank", "expected"), [("trainable", None, 8), ("last_layer", None, 0),
                                                            ("last_layer", 4, 4), ("trainable", 0, 0)])  # fmt: skip
def test_only_trainable_weights_have_a_lora_by_default(
    tmp_path: Path, subspace: str, rank: int | None, expected: int
) -> None:
    arguments = ModelArguments("unused", lora_rank=rank)
    found = arguments.add_lora(tiny_llama(), TaskType.CAUSAL_LM, subspace=subspace)
    assert {len(p) for n, p in found.named_parameters() if "lora_A" in n} == ({expected} if expected else set())


def test_settings_of_a_lora_without_one_are_refused() -> None:
    arguments = ModelArguments("unused", lora_layers=[1])
    with pytest.raises(ValueError, match="there is none with subspace='last_layer' and lora_rank=None: leave them out"):
        arguments.add_lora(tiny_llama(), TaskType.CAUSAL_LM, subspace="last_layer")


def test_the_default_window_is_the_context_of_a_small_model(inputs_of: InputsOf) -> None:
    assert len(inputs_of(TrainingWindowArguments()).train_dataset[0]["input_ids"]) == 128
    with pytest.raises(ValueError, match="--window=256 is longer than the model's longest context, 128 tokens"):
        inputs_of(TrainingWindowArguments(window=256))


def checkpoint(folder: Path, *, without: str = "") -> ModelArguments:
    """Save a Llama that lacks a weight, and has another one that no Llama has a place for."""
    tiny_llama().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name != without}
    save_file({**kept, "model.gate": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelArguments(str(folder))


def test_weights_that_a_model_does_not_use_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has no place for, and they are left out: model.gate"):
        checkpoint(tmp_path).load_language_model()


def test_a_model_without_some_of_its_weights_is_only_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"no weights for lm_head.weight, which the posterior would not hold"):
            checkpoint(tmp_path, without="lm_head.weight").load_language_model()
