from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_bayes.members import compat
from tests.tiny_models import tiny_llama


def owner_of(hook: compat.Hook) -> Any:
    module, _, name = hook.owner.rpartition(".")
    return getattr(importlib.import_module(module), name)


EXAMPLES = {
    "DynamicLayer": DynamicLayer,
    "DynamicCache": DynamicCache,
    "LoraLayer": lambda: LoraLayer(nn.Linear(2, 2)),
}
"""Classes whose attributes are set by ``__init__``, and how to make one."""


@pytest.mark.parametrize("hook", compat.HOOKS, ids=lambda hook: f"{hook.owner.rpartition('.')[2]}.{hook.name}")
def test_every_hook_exists_with_its_parameters(hook: compat.Hook) -> None:
    owner = owner_of(hook)
    if hook.parameters is None:
        example = EXAMPLES.get(owner.__name__)
        assert hasattr(owner if example is None else example(), hook.name)
        return
    parameters = tuple(inspect.signature(getattr(owner, hook.name)).parameters)
    assert parameters[: len(hook.parameters) + 1] == ("self", *hook.parameters)


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


def test_forward_with_reads_given_values_and_restores_others() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    before = layer.weight
    assert compat.forward_with(layer, {"weight": 3 * torch.eye(2)}, x).tolist() == [[3.0, 3.0]]
    assert layer.weight is before
    assert "weight" not in vars(layer)
