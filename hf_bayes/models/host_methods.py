"""The methods of a Bayesian model that transformers and torch call. The model inside answers most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.members import Members
from hf_bayes.models.refusals import CHANGES_OF_THE_BASE, refusal_of, refuse_compiling, refuse_pushing, refuse_saving


class HostMethods(PreTrainedModel):
    """A transformers model around another one.

    Attributes:
        theta: [M, d] parameters that keep their precision.
        members: the members that are installed in the model inside.
    """

    base_model_prefix = "model"
    __getattr__: None  # type: ignore[assignment, misc]  # type checkers: nn.Module's gives a type to misspelled names too
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    theta: nn.Parameter
    members: Members

    @property
    def core(self) -> PreTrainedModel:
        """The transformers model inside."""
        return cast(PreTrainedModel, self.members.core)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_compiling(self)
        return super().__call__(*args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the implementation unchanged: the core has chosen it, and the config is the core's."""
        return attn_implementation

    def _check_and_adjust_experts_implementation(self, experts_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        return experts_implementation

    def place(self, theta: Tensor) -> None:
        """Make a copy of ``theta`` [M, d] the model's own members. Nothing else writes the parameter ``theta``."""
        self.theta.data, self.theta.grad = theta.detach().to(self.theta.device, copy=True), None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Change dtype or device as torch does, but never narrow members: bfloat16 would round their noise away."""
        before = self.theta.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.theta.dtype.itemsize < before.dtype.itemsize:
            self.place(before)
        return self

    @property
    def device(self) -> torch.device:
        return self.theta.device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.core.dtype
        return dtype

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.core.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        head: nn.Module | None = self.core.get_output_embeddings()
        return head

    # transformers' Trainer calls the first pair of names from 5.23 on, and the second pair before
    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.members.checkpointing.enable(self.core.activation_checkpointing_enable, *args, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        self.core.activation_checkpointing_disable()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.members.checkpointing.enable(self.core.gradient_checkpointing_enable, *args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.core.gradient_checkpointing_disable()

    save_pretrained, push_to_hub = refuse_saving, refuse_pushing  # type: ignore[assignment]


for _name in CHANGES_OF_THE_BASE:
    setattr(HostMethods, _name, refusal_of(_name))
