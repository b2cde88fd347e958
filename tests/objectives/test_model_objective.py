from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.passes import member_passes
from tests.objectives.classifier import CHAINS, brute_force, classifier, rows, theta_near
from tests.tiny_models import batch, tiny_llama, with_lora


@pytest.mark.parametrize("members_per_pass", [None, 1, 2])
def test_an_evaluation_is_the_scaled_sum_of_its_micro_batches(members_per_pass: int | None) -> None:
    objective = classifier(members_per_pass=members_per_pass)
    theta, batches = theta_near(objective), [rows(0), rows(1)]
    found = objective.evaluate(theta, batches)
    value, grad = brute_force(objective, theta, batches)
    factor = 40 / 8 * 100 / 40
    torch.testing.assert_close(found.log_lik, factor * value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.grad_log_lik, factor * grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, (-value / 8).double(), rtol=1e-5, atol=1e-6)
    assert found.grad_variance is None


def test_rows_of_a_chain_of_its_own_count_for_it_alone() -> None:
    objective = classifier(shared=False)
    theta, own = theta_near(objective), [rows(seed) for seed in range(CHAINS)]
    joined = {name: torch.cat([one[name] for one in own]) for name in own[0]}
    found = objective.evaluate(theta, [joined])
    expected = [brute_force(objective, theta[k : k + 1], [own[k]]) for k in range(CHAINS)]
    torch.testing.assert_close(found.grad_log_lik, 12.5 * torch.cat([g for _, g in expected]), rtol=1e-4, atol=1e-5)


def test_parts_of_an_update_average_to_the_whole() -> None:
    objective = classifier(in_float64=True, returns_batches=True)
    theta = theta_near(objective)
    evaluate = objective.for_update([rows(seed, 2) for seed in range(4)], step=0)
    whole, parts = evaluate(theta), [evaluate(theta, batches=slice(k, k + 1)) for k in range(4)]
    torch.testing.assert_close(torch.stack([part.log_lik for part in parts]).mean(0), whole.log_lik)
    torch.testing.assert_close(torch.stack([part.log_lik for part in parts], 1), whole.batch_log_lik)
    torch.testing.assert_close(torch.stack([part.grad_log_lik for part in parts]).mean(0), whole.grad_log_lik)
    assert whole.log_lik.dtype == torch.float64


def test_dropout_masks_are_a_function_of_step_and_micro_batch() -> None:
    model = attach(with_lora(tiny_llama(attention_dropout=0.5)), num_members=2)
    objective = ModelObjective(member_passes(model, dropout=True, seed=3), DataScale(10.0, 8, 80, 4))
    one = {**batch(seed=0, rows=4)}
    one["labels"] = one["input_ids"]

    def gradient(step: int) -> Tensor:
        grad = objective.for_update([one], step=step)(model.theta.detach()).grad_log_lik
        assert grad is not None
        return grad

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    theta = model.theta.detach()
    passes = (objective.passes.of_batch(theta, one, gradient=True, step=1, micro=micro) for micro in (0, 1))
    first, second = (next(some).grad for some in passes)
    assert not torch.equal(first, second)


def test_the_name_of_a_column_is_that_of_its_parameter() -> None:
    objective = classifier()
    names, sizes = objective.model.layout.names, objective.model.layout.sizes
    assert objective.place_of(0) == f", {names[0]}"
    assert objective.place_of(sizes[0]) == f", {names[1]}"
    assert objective.place_of(sum(sizes) - 1) == f", {names[-1]}"
