"""The models that are timed: Llamas from a configuration, with random weights. Needs torch, transformers and peft only.

Everything is a pure function of its arguments, so that a process of another environment builds the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, int]] = {
    "30M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "vocab_size": 8192,
            "num_attention_heads": 8, "num_key_value_heads": 8},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
"""Fields of LlamaConfig by name; 30M counts what is not embedding, 8B is Llama 3.1 8B."""

RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


WHERE = ("all layers", "the last layer", "the last block, in full")
"""The random parameters: LoRA on the attention of all layers or of the last one, or all weights of the last block."""


@dataclass(frozen=True)
class Subject:
    """A model, but for what is trained in it.

    Attributes:
        shape: of ``SHAPES``.
        device: a torch device type.
        dtype: of the base model.
    """

    shape: str
    device: str
    dtype: str

    @property
    def fields(self) -> dict[str, int]:
        return SHAPES[self.shape]

    def plain(self) -> LlamaForCausalLM:
        """The model with the weights of seed 0, made where they will be used."""
        config = LlamaConfig(
            **self.fields, max_position_embeddings=4096, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        try:
            torch.set_default_dtype(getattr(torch, self.dtype))
            with torch.device(self.device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def trainable(self, where: str, *, num_adapters: int = 1) -> Any:
        """The model with ``where`` (of ``WHERE``) trainable and the rest frozen; adapters as ``adapter_name`` says."""
        model, last = self.plain(), self.fields["num_hidden_layers"] - 1
        if where == WHERE[2]:
            model.requires_grad_(False)
            model.model.layers[last].requires_grad_(True)
            return model
        layers = None if where == WHERE[0] else [last]
        config = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, layers_to_transform=layers, task_type="CAUSAL_LM"
        )
        wrapped = get_peft_model(model, config)
        for member in range(1, num_adapters):
            wrapped.add_adapter(adapter_name(member), config)
        return wrapped.eval()


def adapter_name(member: int) -> str:
    """Return peft's name of a member's adapter."""
    return f"member{member}" if member else "default"


def members(like: Tensor, num_members: int) -> Tensor:
    """[M, d]: seeded members near ``like`` [d], no two and no factor of a LoRA alike."""
    noise = torch.randn(num_members, len(like), generator=torch.Generator().manual_seed(1))
    return like + 0.02 * noise.to(like)


def tokens(model: Any, rows: int, length: int, seed: int = 2) -> Tensor:
    """[rows, length] random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
