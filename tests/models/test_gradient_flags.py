from __future__ import annotations

from torch import nn

from hf_bayes.models.gradient_flags import GradientFlags


def test_flags_come_back_as_they_were() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    flags = GradientFlags(model)
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(True)
    flags.restore()
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
