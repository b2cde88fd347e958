"""Record what ``attach`` changes in a wrapped model, so that ``detach`` can give the model back as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from torch import nn

from hf_bayes.models.gradient_flags import GradientFlags
from hf_bayes.models.loading import unwrapped


class Restoration:
    """The state of a model before it was wrapped.

    Attributes:
        handles: hooks that are removed when the model is given back.
        own_base: the flags of a base model that the caller gave to ``from_pretrained``. Its adapter is removed again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = GradientFlags(model)
        self.handles: Sequence[Any] = ()
        self.own_base: GradientFlags | None = None

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
