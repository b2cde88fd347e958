"""Record what ``attach`` changes in a wrapped model, so that ``detach`` can give the model back as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn

from hf_bayes.core.layout import modules_of


class GradientFlags:
    """The ``requires_grad`` of every parameter of a model, as it was when this record was made."""

    def __init__(self, model: nn.Module) -> None:
        self.flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Set every parameter's ``requires_grad`` back."""
        for parameter, requires_grad in self.flags:
            parameter.requires_grad_(requires_grad)


class BaseState(GradientFlags):
    """The ``requires_grad`` of a base model's parameters, and the weights that building an adapter changes.

    Args:
        changed: the paths of the modules whose weights are changed (PiSSA and OLoRA subtract the adapter's start).
    """

    def __init__(self, model: nn.Module, changed: Collection[str] = ()) -> None:
        super().__init__(model)
        modules = [module for path, module in model.named_modules() if path in changed]
        self.values = [(parameter, parameter.detach().clone()) for m in modules for parameter in m.parameters()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the flags and the weights back. A dtype to which the model has been converted stays."""
        super().restore()
        for parameter, value in self.values:
            parameter.copy_(value)


def unwrapped(model: PeftModel) -> nn.Module:
    """Remove the adapter of a peft model and return the model inside, with its original modules."""
    base: nn.Module = model.get_base_model()
    # peft would leave its copies of modules_to_save in their places
    own = {path: module.original_module for path, module in modules_of(base, ModulesToSaveWrapper).items()}
    model.unload()
    for name, module in own.items():
        base.set_submodule(name, module)
    return base


class Restoration:
    """The state of a model before it was wrapped.

    Attributes:
        handles: hooks that are removed when the model is given back.
        own_base: the state of a base model that the caller gave to ``from_pretrained``. Its adapter is removed again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = GradientFlags(model)
        self.handles: Sequence[Any] = ()
        self.own_base: BaseState | None = None

    def give_back(self, model: nn.Module) -> nn.Module:
        """Return ``model`` as it was, or the caller's own base model without the posterior's adapter."""
        for handle in self.handles:
            handle.remove()
        self.before.restore()
        if self.own_base is None or not isinstance(model, PeftModel):
            return model
        base = unwrapped(model)
        self.own_base.restore()
        return base
