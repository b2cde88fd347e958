"""The parts of DPOTrainer that we fill in, on a stand-in for it; tests/training/test_trl_dpo.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_bayes import DirectPreferences, attach
from hf_bayes.training.data.preferences import as_trl_batch, pairs_of
from hf_bayes.training.dpo_reference import StandIn, reference_given
from tests.models.test_preferences import pairs
from tests.tiny_models import tiny_llama


def host() -> Any:
    return SimpleNamespace(compute_ref_log_probs=None, precompute_ref_logps=False)


def test_a_trainer_gets_a_reference_without_weights() -> None:
    model = attach(tiny_llama(), subspace="last_block", num_members=2, likelihood=DirectPreferences())
    trainer, kwargs = host(), {}
    with reference_given(trainer, model, kwargs):
        model.forward = lambda **_: None  # type: ignore[method-assign]  # as TRL does
    assert "forward" not in vars(model)
    stand_in = kwargs["ref_model"]
    assert isinstance(stand_in, StandIn)
    assert not list(stand_in.parameters())
    batch = pairs()
    first, second = trainer.compute_ref_log_probs(stand_in, as_trl_batch(batch))
    assert torch.allclose(torch.stack([first, second], 1).double(), model.reference_log_probs(batch))
    before = stand_in.state_dict()["reference"]
    model.reference = model.reference + 1
    assert not torch.equal(stand_in.state_dict()["reference"], before)


def test_a_given_reference_model_computes_the_log_probabilities() -> None:
    model = attach(tiny_llama(), subspace="last_block", num_members=2, likelihood=DirectPreferences())
    trainer, other = host(), object()
    trainer.ref_model = other
    trainer.compute_ref_log_probs = lambda given, inputs: (
        torch.full((len(inputs["input_ids"]) // 2,), 1.0 if given is other else 0.0), torch.zeros(4)
    )  # fmt: skip
    with reference_given(trainer, model, {"ref_model": other}):
        pass
    assert model.reference_log_probs(pairs()).tolist() == [[1.0, 0.0]] * 4


def test_halves_and_pairs_are_inverse() -> None:
    batch = pairs()
    found = pairs_of(as_trl_batch(batch), 4)
    assert all(torch.equal(found[name], batch[name]) for name in ("input_ids", "attention_mask", "completion_mask"))


def test_a_model_of_tokens_is_not_changed() -> None:
    kwargs: dict[str, Any] = {}
    model = attach(tiny_llama(), subspace="last_block")
    with reference_given(host(), model, kwargs):
        model.forward = lambda **_: None  # type: ignore[method-assign]
    assert kwargs == {}
    assert "forward" in vars(model)
