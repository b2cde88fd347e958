"""Saving and merging of a live model, which would leave its members out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from hf_bayes import attach
from hf_bayes.members.weight_methods import NAMES
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora


@pytest.mark.parametrize("name", NAMES)
def test_a_peft_model_with_members_is_neither_saved_nor_merged(tmp_path: Path, name: str) -> None:
    model = with_lora(tiny_llama())
    with attach(model) as bayesian, torch.no_grad():
        bayesian.theta.add_(0.1)
        before = bayesian(**batch()).logits
        with pytest.raises(ValueError, match=rf"PeftModelForCausalLM.{name}\(\) would leave .*save_model\(\)"):
            getattr(model, name)(str(tmp_path))
        assert torch.equal(bayesian(**batch()).logits, before)
        assert not list(tmp_path.iterdir())


def test_a_model_that_is_given_back_is_saved_as_usual(tmp_path: Path) -> None:
    model = with_lora(tiny_llama())
    own = model.save_pretrained = lambda folder: "of an object"  # type: ignore[method-assign]
    with attach(model), pytest.raises(ValueError, match="would leave the members out"):
        model.save_pretrained(tmp_path)
    assert model.save_pretrained is own
    del model.save_pretrained
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    assert "merge_and_unload" not in vars(model)


def test_a_plain_model_with_members_is_not_saved(tmp_path: Path) -> None:
    bert = tiny_bert()
    with attach(bert, subspace="last_layer"), pytest.raises(ValueError, match="BertForSequenceClassification"):
        bert.save_pretrained(tmp_path)
    bert.save_pretrained(tmp_path)
    assert not hasattr(bert, "merge_and_unload")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_refuses_too_until_it_is_given_back(tmp_path: Path, copied: object) -> None:
    model = with_lora(tiny_llama())
    with attach(model) as bayesian:
        twin = copied(bayesian)  # type: ignore[operator]
        with pytest.raises(ValueError, match="would leave the members out"):
            twin.model.save_pretrained(tmp_path)
        plain = twin.detach()
        plain.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="would leave the members out"):
            model.save_pretrained(tmp_path)
    assert "save_pretrained" not in vars(plain)
