from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, TextGenerationPipeline, Trainer, TrainingArguments
from transformers.cache_utils import DynamicLayer
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_bayes.core.compat import PrivateName
from hf_bayes.members.compat.transformers_names import NAMES
from tests.host_names import fault_of, label
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer


def checkpointed() -> Any:
    """Return a model whose blocks are checkpointed, and whose embeddings have the hooks for it."""
    model: Any = tiny_llama()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    model.enable_input_require_grads()
    return model


EXAMPLES: dict[str, Callable[[], Any]] = {
    "transformers.cache_utils.DynamicLayer": DynamicLayer,
    "transformers.cache_utils.DynamicCache": DynamicCache,
    "transformers.modeling_layers.GradientCheckpointingLayer": lambda: checkpointed().model.layers[0],
    "transformers.PreTrainedModel": checkpointed,
    "transformers.PreTrainedConfig": lambda: tiny_gpt2().config,
    "transformers.trainer_jit_checkpoint.JITCheckpointCallback": JITCheckpointCallback,
    "transformers.trainer_jit_checkpoint.CheckpointManager": lambda: CheckpointManager(None),
    "transformers.Pipeline": lambda: TextGenerationPipeline(model=tiny_llama(), tokenizer=tiny_tokenizer()),
}
"""Classes whose attributes are set on their objects, and how to make such an object."""


@pytest.mark.parametrize("entry", NAMES, ids=label)
def test_transformers_has_the_name_with_its_parameters(entry: PrivateName, tmp_path: Path) -> None:
    trainer = {"transformers.Trainer": lambda: Trainer(tiny_gpt2(), TrainingArguments(str(tmp_path), use_cpu=True))}
    assert fault_of(entry, EXAMPLES | trainer) == ""
