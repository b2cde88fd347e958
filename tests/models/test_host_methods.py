"""The methods of a Bayesian model that transformers and torch call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_bayes import attach
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.refusals import CHANGES_OF_THE_BASE
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora


def test_the_model_inside_answers_for_embeddings_and_precision() -> None:
    model = attach(with_lora(tiny_llama()))
    assert model.get_input_embeddings() is model.core.get_input_embeddings()
    assert model.get_output_embeddings() is model.core.get_output_embeddings()
    assert (model.dtype, model.device) == (torch.float32, model.theta.device)


def test_members_stay_wide_when_the_model_is_narrowed() -> None:
    model = attach(with_lora(tiny_llama())).to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.theta.dtype == torch.float32


def test_other_members_do_not_keep_the_gradient_of_the_old_ones() -> None:
    model = attach(with_lora(tiny_llama()), num_members=3)
    given = model.theta.detach()[:2] + 1
    model.theta.grad = torch.ones_like(model.theta)
    model.place(given)
    assert model.theta.grad is None
    assert torch.equal(model.theta, given)
    given.zero_()
    assert bool((model.theta != 0).any())  # a copy
    model.theta.square().sum().backward()
    assert model.theta.grad.shape == model.theta.shape


@pytest.mark.parametrize("build", [tiny_llama, tiny_bert])
@pytest.mark.parametrize("name", CHANGES_OF_THE_BASE)
def test_a_change_of_the_model_inside_is_refused(name: str, build: Any) -> None:
    model = attach(with_lora(build()), num_members=2)
    before = model(**batch()).logits
    assert hasattr(PreTrainedModel, name)
    with pytest.raises(
        ValueError, match=rf"^{name} would change the model inside .* Call detach\(\), change the model"
    ):
        getattr(model, name)(torch.nn.Identity())
    assert torch.equal(model(**batch()).logits, before)


@pytest.mark.parametrize("name", CHANGES_OF_THE_BASE)
def test_no_class_of_a_task_takes_a_refused_change(name: str) -> None:
    assert {getattr(kind, name).__module__ for kind in MODELS.values()} == {"hf_bayes.models.refusals"}
