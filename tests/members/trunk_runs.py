"""Models whose last block is random, and a count of the runs of a module before it."""

from __future__ import annotations

from torch import nn

from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama


class Calls:
    """A counter of the forwards of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_hook(self)

    def __call__(self, *args: object) -> None:
        self.count += 1


LAST_BLOCK = {
    "llama": (tiny_llama, "model.layers.0.self_attn"),
    "gpt2": (tiny_gpt2, "transformer.h.0.attn"),
    "bert": (tiny_bert, "bert.encoder.layer.0.attention.self"),
}
