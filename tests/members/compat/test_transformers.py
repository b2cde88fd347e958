from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.utils.checkpoint import checkpoint
from transformers import (
    DynamicCache,
    GenerationMixin,
    Pipeline,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.models.auto import modeling_auto

from hf_bayes.members.compat import transformers as compat
from hf_bayes.members.compat.transformers_names import NAMES
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama


def test_private_names_are_the_ones_that_transformers_sets() -> None:
    model: Any = tiny_llama()
    block = model.model.layers[0]
    assert block in compat.checkpointing_modules(model)
    assert not compat.is_checkpointing(block)
    before = compat.checkpointing_state(block)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    assert compat.is_checkpointing(block)
    assert compat.checkpointing_function(block).keywords == {"use_reentrant": False}  # type: ignore[attr-defined]
    compat.restore_checkpointing_state(block, before)
    assert compat.checkpointing_state(block) == before


def test_checkpointed_blocks_call_the_function_that_is_set() -> None:
    model: Any = tiny_llama().train()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return checkpoint(*args, use_reentrant=False, **kwargs)

    compat.set_checkpointing_function(model.model.layers[0], counted)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == 1


def test_hooks_on_embeddings_are_found_and_forgotten() -> None:
    model: PreTrainedModel = tiny_llama()
    assert compat.input_grad_hooks(model) is None
    model.enable_input_require_grads()
    assert compat.input_grad_hooks(model)
    model.disable_input_require_grads()
    assert not compat.input_grad_hooks(model)
    compat.forget_input_grad_hooks(model)
    assert compat.input_grad_hooks(model) is None


def names_of(owner: str, *uses: str) -> set[str]:
    return {entry.name for entry in NAMES if entry.owner.endswith(owner) and (not uses or entry.use in uses)}


def test_configurations_have_the_fields_that_are_read() -> None:
    config = tiny_gpt2().config
    fields = names_of("PreTrainedConfig")
    assert fields == {"_attn_implementation", "_experts_implementation", "_name_or_path"}
    assert all(hasattr(config, name) for name in fields)


def test_mappings_and_audio_models_have_the_names_that_are_read() -> None:
    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = Wav2Vec2ForCTC(Wav2Vec2Config(num_hidden_layers=0, hidden_size=12, conv_dim=(4, 4), conv_stride=(2, 2),
                                          conv_kernel=(3, 3), num_conv_pos_embeddings=2,
                                          num_conv_pos_embedding_groups=2, feat_extract_norm="layer"))  # fmt: skip
    assert compat.num_frames(model, 101) == 24  # (101 - 3) // 2 + 1 = 50, then (50 - 3) // 2 + 1
    assert names_of("MAPPING") == {"_model_mapping", "_extra_content"}
    assert all(hasattr(mapping, name) for name in names_of("MAPPING"))
    assert all(hasattr(modeling_auto.AutoModelForCausalLM, name) for name in names_of("AutoModelForCausalLM"))
    assert all(hasattr(model, name) for name in names_of("Wav2Vec2PreTrainedModel"))


def test_private_reads_find_what_transformers_keeps() -> None:
    core = tiny_gpt2()
    assert compat.attention_of(core.config) == core.config._attn_implementation
    assert compat.source_of(core.config) == ""
    assert compat.num_frames(core, 100) is None
    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    assert compat.loaders_of_mappings()[id(mapping)] == "AutoModelForCausalLM"
    assert "GPT2LMHeadModel" in compat.names_in_mapping(mapping)
    assert isinstance(compat.registered_in_mapping(mapping), list)


def test_generation_has_no_way_of_its_own_to_reorder_a_cache() -> None:
    assert not hasattr(GenerationMixin, "_reorder_cache")  # it looks for one in the class of the model


def test_pipelines_keep_the_settings_that_are_read() -> None:
    source = inspect.getsource(Pipeline)
    assert names_of("Pipeline", "read") == {"_batch_size", "_preprocess_params"}
    assert "self._batch_size = " in source
    assert "self._preprocess_params, " in source
    (argument,) = names_of("pipelines.pipeline", "argument")
    assert f"{argument}=task" in inspect.getsource(transformers.pipelines)


def test_trainer_sets_the_attributes_that_we_read() -> None:
    attributes = names_of("Trainer", "read", "replaced")
    assert attributes == {"_signature_columns"}
    assert all(f"self.{name} = " in inspect.getsource(Trainer) for name in attributes)


def test_a_trainer_is_read_by_its_private_methods(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "other": [0]})
    trainer = Trainer(tiny_gpt2(), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=rows)
    assert compat.output_dir_of(trainer, None) == str(tmp_path)
    batch = {"input_ids": torch.tensor([[1, 2]])}
    assert torch.equal(compat.prepared_inputs(trainer, batch)["input_ids"], batch["input_ids"])
    compat.keep_columns(trainer, ["input_ids"])
    assert compat.without_unused_columns(trainer, rows, "training").column_names == ["input_ids"]
    collated = compat.collator_without_unused_columns(trainer, "training")([{"input_ids": [1, 2], "other": 0}])
    assert list(collated) == ["input_ids"]


def test_columns_are_those_of_a_subclass_that_has_a_method(tmp_path: Path) -> None:
    class Own(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["lengths"]

    args = TrainingArguments(str(tmp_path), use_cpu=True)
    assert compat.columns_of_subclass(Trainer(tiny_gpt2(), args)) == []
    assert compat.columns_of_subclass(Own(tiny_gpt2(), args)) == ["lengths"]


def test_a_cache_has_the_name_that_models_and_outputs_give_it() -> None:
    core = tiny_llama()
    output = core(torch.tensor([[1, 2, 3]]), use_cache=True)
    cache = compat.cache_of(output)
    assert isinstance(cache, DynamicCache)
    assert cache is output[compat.CACHE]
    assert compat.cache_of(core(torch.tensor([[1, 2, 3]]), use_cache=False)) is None
    assert compat.takes_cache(core)
    assert not compat.takes_cache(tiny_bert())


def test_a_cache_is_taken_under_the_name_of_any_version() -> None:
    cache = DynamicCache()
    for name in ("cache", "past_key_values", "cache_params"):
        assert compat.with_cache_named({name: cache, "x": 1}) == {compat.CACHE: cache, "x": 1}
    assert compat.with_cache_named({"cache": None, "past_key_values": cache}) == {compat.CACHE: cache}
    assert compat.with_cache_named({"cache": None, "x": 1}) == {"x": 1}
    with pytest.raises(ValueError, match="got keys and values twice, under two of the names cache, past_key_values, "):
        compat.with_cache_named({"cache": cache, "past_key_values": cache})
