"""The ``requires_grad`` of a model's parameters, kept so that it can be set back."""

from __future__ import annotations

from torch import nn


class GradientFlags:
    """The ``requires_grad`` of every parameter of a model, as it was when this record was made."""

    def __init__(self, model: nn.Module) -> None:
        self.flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Set every parameter's ``requires_grad`` back."""
        for parameter, requires_grad in self.flags:
            parameter.requires_grad_(requires_grad)
