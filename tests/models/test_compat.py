"""Private names of host libraries stand in one list, and the installed versions have them as it says."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import Pipeline, PreTrainedConfig, Wav2Vec2Config, Wav2Vec2ForCTC
from transformers.models.auto import modeling_auto

import hf_bayes
from hf_bayes.models import compat
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.compat import ALLOWED, ATTRIBUTES, CONFIG_FIELDS, HOOKS, READ, PrivateMethod
from hf_bayes.pipelines.factory import _PIPELINES
from hf_bayes.pipelines.registration import RegisteredPipeline
from tests.tiny_models import tiny_gpt2

PACKAGE = Path(hf_bayes.__file__).parent
INSTALLED = [hook for hook in HOOKS if not hook.owner.startswith("lm_eval.")]  # see pipelines/test_lm_harness.py
OURS = {"_asdict", "_fields", "_replace", "_restoration"}
"""Names with an underscore that are Python's or this package's own."""


def owner_of(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


@pytest.mark.parametrize("hook", [*INSTALLED, *ALLOWED], ids=lambda hook: hook.name)
def test_a_private_hook_has_the_parameters_of_the_list(hook: PrivateMethod) -> None:
    found = getattr(owner_of(hook.owner), hook.name, None)
    assert (None if found is None else tuple(inspect.signature(found).parameters)[1:]) == hook.parameters


@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES)
def test_a_private_attribute_of_the_list_exists(owner: str, name: str) -> None:
    assert hasattr(owner_of(owner), name)


def our_classes() -> list[type]:
    kinds = {kind for top in (*MODELS.values(), *_PIPELINES, RegisteredPipeline) for kind in top.__mro__}
    return [kind for kind in kinds if kind.__module__.startswith("hf_bayes.")]


def test_every_override_of_a_private_name_is_in_the_list() -> None:
    listed = {hook.name for hook in INSTALLED} | {name for _, name in ATTRIBUTES}
    hosts = [owner_of(owner) for owner in {hook.owner for hook in INSTALLED}]
    overridden = {
        name
        for kind in our_classes()
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and any(hasattr(host, name) for host in hosts)
    }
    assert overridden - listed - {"_abc_impl", "_is_protocol"} == set()
    assert listed - overridden == {"_reorder_cache"}  # generate looks it up, and has none of its own
    assert all("_reorder_cache" in dir(MODELS[task]) for task in ("causal_lm", "image_text_to_text"))


def test_every_override_takes_what_the_host_passes() -> None:
    kinds = inspect.Parameter
    for hook in HOOKS:
        if hook.owner == "transformers.Pipeline":  # each pipeline of transformers has parameters of its own
            continue
        for own in (vars(kind)[hook.name] for kind in our_classes() if hook.name in vars(kind)):
            taken = inspect.signature(own).parameters
            collects = {parameter.kind for parameter in taken.values()} & {kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL}
            assert collects or set(hook.parameters or ()) <= set(taken), hook.name


def private_reads(file: Path) -> Iterator[str]:
    """Names with an underscore that a file reads of something other than ``self``, or as text in ``getattr``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = "", ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and owner not in ("self", "cls", "super()"):
            yield name


@pytest.mark.parametrize("package", ["models", "pipelines"])
def test_other_files_read_no_private_name_of_a_host(package: str) -> None:
    listed = {hook.name for hook in HOOKS}
    for file in sorted((PACKAGE / package).rglob("*.py")):
        if file.name != "compat.py":
            assert set(private_reads(file)) - OURS - listed == set(), file.name


def test_transformers_has_the_names_that_are_read() -> None:
    config = tiny_gpt2().config
    assert all(hasattr(config, name) for name in CONFIG_FIELDS if name != "_commit_hash")
    assert "_commit_hash" in inspect.getsource(PreTrainedConfig)  # set by from_pretrained
    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = Wav2Vec2ForCTC(Wav2Vec2Config(num_hidden_layers=0, hidden_size=12, conv_dim=(4, 4), conv_stride=(2, 2),
                                          conv_kernel=(3, 3), num_conv_pos_embeddings=2,
                                          num_conv_pos_embedding_groups=2, feat_extract_norm="layer"))  # fmt: skip
    assert compat.num_frames(model, 101) == 24  # (101 - 3) // 2 + 1 = 50, then (50 - 3) // 2 + 1
    found = {
        name for owner in (mapping, modeling_auto.AutoModelForCausalLM, model) for name in READ if hasattr(owner, name)
    }
    assert found | {"_batch_size", "_preprocess_params"} == set(READ)  # pipelines have these two, see below


def test_private_reads_find_what_transformers_keeps() -> None:
    core = tiny_gpt2()
    assert compat.attention_of(core.config) == core.config._attn_implementation
    assert compat.source_of(core.config) == ""
    assert compat.commit_of(core.config) is None
    assert compat.num_frames(core, 100) is None
    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    assert compat.loaders_of_mappings()[id(mapping)] == "AutoModelForCausalLM"
    assert "GPT2LMHeadModel" in compat.names_in_mapping(mapping)
    assert isinstance(compat.registered_in_mapping(mapping), list)


def test_pipelines_keep_the_settings_that_are_read() -> None:
    source = inspect.getsource(Pipeline)
    assert "self._batch_size = " in source
    assert "self._preprocess_params, " in source
    assert all(f"{name}=task" in inspect.getsource(transformers.pipelines) for name in compat.PRIVATE_ARGUMENTS)
