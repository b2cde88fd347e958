from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.models.attaching import attach
from hf_bayes.models.restoration import BaseState, GradientFlags
from tests.members.subjects import SUBJECTS, labelled
from tests.models.prepared import prepared, unchanged
from tests.tiny_models import CHECKPOINTING, switch_on_checkpointing, tiny_llama, with_lora


@pytest.mark.parametrize("name", SUBJECTS)
def test_detach_gives_the_model_back_exactly(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with unchanged(model):
        bayesian = attach(model, theta, subspace=subspace)
        bayesian(**labelled(name), theta=theta.clone().requires_grad_()).loss.sum().backward()
        assert bayesian.detach() is model


def test_checkpointing_enabled_while_attached_is_disabled_again() -> None:
    model = with_lora(tiny_llama())
    with unchanged(model), attach(model) as bayesian:
        switch_on_checkpointing(bayesian)
        leaf = bayesian.theta.detach().requires_grad_()
        bayesian.train()(**labelled("llama-lora"), theta=leaf).loss.sum().backward()
        bayesian.eval()


def test_checkpointing_switched_on_before_stays_on() -> None:
    model = tiny_llama()
    switch_on_checkpointing(model)
    with unchanged(model):
        attach(model, subspace="last_block").detach()
    assert getattr(model, f"is_{CHECKPOINTING}")


def test_the_attention_of_the_wrapped_model_stays_its_own() -> None:
    model = tiny_llama(attn_implementation="eager")
    with unchanged(model), attach(model, subspace="last_block") as bayesian:
        assert bayesian.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changed_weights_come_back_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = BaseState(model, ["0"])
    model.to(dtype).requires_grad_(False)
    with torch.no_grad():
        model[0].weight -= 1
    state.restore()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(p, value.to(dtype)) for p, value in zip(model.parameters(), before, strict=True))


def test_flags_come_back_as_they_were() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    flags = GradientFlags(model)
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(True)
    flags.restore()
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
