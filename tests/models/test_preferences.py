"""Causal language models on pairs of answers, against separate models in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import DirectPreferences, LaplaceConfig, attach, fit_laplace
from hf_bayes.models.preferences import BayesianModelForPreferences
from tests.tiny_models import VOCABULARY, tiny_bert, tiny_llama

BETA = 0.7
MEMBERS = 3


def pairs(rows: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Pairs with prompts of two tokens, answers of different lengths, and padding on the right."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, 2, 7), generator=random)
    lengths = torch.randint(3, 8, (rows, 2, 1), generator=random)
    places = torch.arange(7)
    mask = (places < lengths).long()
    labels = torch.randint(0, 2, (rows,), generator=random)
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": mask * (places >= 2), "labels": labels}


def preferring(subspace: str = "last_block") -> BayesianModelForPreferences:
    model = attach(
        tiny_llama(dtype=torch.float64), subspace=subspace, num_members=1, likelihood=DirectPreferences(beta=BETA)
    )
    assert isinstance(model, BayesianModelForPreferences)
    random = torch.Generator().manual_seed(1)
    start = model.theta.detach()[0].double()
    noise = torch.randn(MEMBERS, len(start), generator=random, dtype=torch.float64)
    model.theta = torch.nn.Parameter(start + 0.1 * noise)
    model.reference = start + 0.1 * torch.randn(len(start), generator=random, dtype=torch.float64)
    return model.eval()


def answers(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probabilities [B, 2] of answers under one ordinary model, token by token."""
    ids, mask, answer = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "completion_mask"))
    log_probs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    chosen = log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return (chosen * answer[:, 1:]).sum(1).view(-1, 2)


def separate(bayesian: BayesianModelForPreferences, row: Tensor) -> Any:
    """Return an ordinary model with the weights of one member."""
    model = tiny_llama(dtype=torch.float64).eval()
    named = dict(model.named_parameters())
    for name, value in bayesian.layout.unflatten(row[None]).items():
        named[name].data = value[0].clone()
    return model


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("subspace", ["last_block", "last_layer"])
def test_loss_and_gradient_are_those_of_separate_models(subspace: str, folded: bool) -> None:
    bayesian = preferring(subspace)
    theta = bayesian.theta.detach().clone().requires_grad_()
    batch = pairs(MEMBERS * 2 if folded else 4)
    loss, num_terms = bayesian(**batch, theta=theta, folded=folded)
    loss.sum().backward()
    assert theta.grad is not None
    reference = separate(bayesian, bayesian.reference)
    for member in range(MEMBERS):
        own = {name: value.chunk(MEMBERS)[member] if folded else value for name, value in batch.items()}
        model = separate(bayesian, theta.detach()[member])
        with torch.no_grad():
            log_ref = answers(reference, own)
        rewards = BETA * (answers(model, own) - log_ref)
        sign = 1 - 2 * own["labels"]
        expected = -torch.nn.functional.logsigmoid(sign * (rewards[:, 0] - rewards[:, 1])).sum()
        expected.backward()
        named = dict(model.named_parameters())
        gradient = torch.cat([named[name].grad.flatten() for name in bayesian.layout.names])
        assert int(num_terms[member]) == len(own["labels"])
        # float64 sums in another order
        assert abs(float(loss[member]) - float(expected)) < 1e-10
        assert torch.allclose(theta.grad[member], gradient, atol=1e-10)
        # the broken twin: without the reference the loss is another one
        without = BETA * answers(model, own)
        assert abs(float(loss[member]) + float(
            torch.nn.functional.logsigmoid(sign * (without[:, 0] - without[:, 1])).sum()
        )) > 1e-3  # fmt: skip


def test_a_prediction_is_the_mean_of_the_members_choices() -> None:
    bayesian, batch = preferring(), pairs()
    reference = separate(bayesian, bayesian.reference)
    with torch.no_grad():
        rewards = torch.stack(
            [BETA * (answers(separate(bayesian, row), batch) - answers(reference, batch)) for row in bayesian.theta]
        )
        found, logits = bayesian.evaluate_batch(batch, keep_logits=True)
    probs = rewards.softmax(-1).mean(0)
    assert logits is not None
    assert torch.allclose(logits.exp().double(), probs, atol=1e-6)  # rewards are float32 in predictions
    chosen = probs.gather(1, batch["labels"][:, None])[:, 0]
    assert torch.allclose(found["nll"].double(), -chosen.log(), atol=1e-6)
    assert (found["epistemic"] > 0).all()


def test_given_reference_log_probabilities_are_used() -> None:
    bayesian, batch = preferring(), pairs()
    theta = bayesian.theta.detach()
    with torch.no_grad():
        own = bayesian(**batch, theta=theta).loss
        given = bayesian(**batch, ref_logps=bayesian.reference_log_probs(batch), theta=theta).loss
        moved = bayesian(**batch, ref_logps=bayesian.reference_log_probs(batch) + torch.tensor([1.0, 0.0]), theta=theta)
    assert torch.allclose(own, given, atol=1e-12)  # float64
    assert not torch.allclose(own, moved.loss, atol=1e-3)


def test_a_model_of_preferences_generates() -> None:
    bayesian, prompt = preferring(), {"input_ids": pairs()["input_ids"][:, 0]}
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    found = bayesian.generate(**prompt, **how)
    theta, model = bayesian.theta.detach(), bayesian.detach()
    with attach(model, theta, subspace="last_block") as plain:
        expected = plain.generate(**prompt, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.epistemic, expected.epistemic)


def test_the_reference_leaves_each_module_in_its_mode() -> None:
    bayesian, batch = preferring().train(), pairs()
    frozen = bayesian.core.model.layers[0].eval()
    bayesian.reference_log_probs(batch)
    assert bayesian.training
    assert bayesian.core.model.layers[1].training
    assert not any(module.training for module in frozen.modules())


def test_the_reference_runs_once_for_all_passes_of_a_batch() -> None:
    bayesian, batch = preferring(), pairs()
    first = bayesian.reference_log_probs(batch)
    assert bayesian.reference_log_probs(batch) is first
    assert bayesian.reference_log_probs(pairs(seed=3)) is not first


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "completion_mask"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_changed_batch_has_another_reference(name: str, in_place: bool) -> None:
    bayesian, batch, other = preferring(), pairs(), pairs(seed=3)
    bayesian.reference_log_probs(batch)
    if in_place:
        batch[name].copy_(other[name])
    else:
        batch[name] = other[name]
    expected = preferring().reference_log_probs(batch)
    assert torch.equal(bayesian.reference_log_probs(batch), expected)


def test_inference_tensors_have_a_reference() -> None:
    with torch.inference_mode():
        batch = pairs()
        bayesian = preferring()
        found = bayesian.reference_log_probs(batch)
        batch["input_ids"].copy_(pairs(seed=3)["input_ids"])
        assert not torch.equal(bayesian.reference_log_probs(batch), found)


def test_rows_that_are_no_pairs_are_refused() -> None:
    bayesian, batch = preferring(), pairs()
    del batch["completion_mask"]
    with pytest.raises(ValueError, match=r"preferences need input_ids \[rows, 2, tokens\] and a completion_mask"):
        bayesian(**batch, theta=bayesian.theta.detach())


def test_a_classifier_has_no_answers() -> None:
    with pytest.raises(ValueError, match="of the answers of a causal language model"):
        attach(tiny_bert(), subspace="last_layer", likelihood=DirectPreferences())


def test_a_policy_that_is_its_own_reference_is_refused() -> None:
    bayesian, batch = preferring(), pairs()
    rows = [{name: value[number] for name, value in batch.items()} for number in range(4)]
    bayesian.theta = torch.nn.Parameter(bayesian.reference[None].clone())
    with pytest.raises(ValueError, match="the model is its own reference, so that the rewards of all answers are 0"):
        fit_laplace(bayesian, rows, subspace="last_block")
    given = [row | {"ref_logps": torch.tensor([-20.0, -21.0])} for row in rows]
    with pytest.warns(UserWarning, match="the weights are no MAP"):
        posterior = fit_laplace(bayesian, given, LaplaceConfig(prior_std=0.1), subspace="last_block")
    assert posterior.config.head["preferences"]["beta"] == BETA
