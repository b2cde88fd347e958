from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.model_objective import ModelObjective
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora

CHAINS = 3


def classifier(**options: Any) -> ModelObjective:
    model = attach(tiny_bert(), subspace="last_layer", num_members=CHAINS)
    scale = DataScale(100.0, num_rows=40, num_terms=40, rows_per_update=8)
    return ModelObjective(model, scale, **options)


def rows(seed: int, count: int = 4) -> dict[str, Tensor]:
    return {**batch(seed=seed, rows=count), "labels": torch.arange(count) % 2}


def theta_near(objective: ModelObjective) -> Tensor:
    theta = objective.model.theta.detach()
    return theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(0))


def brute_force(objective: ModelObjective, theta: Tensor, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sums of log-likelihoods [M] and their gradient [M, d], one member and one batch at a time."""
    values, grads = [], []
    for row in theta:
        leaf = row[None].clone().requires_grad_()
        total = sum(-objective.model(**one, theta=leaf, folded=False).loss.sum() for one in batches)
        (grad,) = torch.autograd.grad(total, leaf)
        values.append(total.detach())
        grads.append(grad[0])
    return torch.stack(values), torch.stack(grads)


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


def test_variance_of_a_gradient_is_that_of_its_micro_batches() -> None:
    objective = classifier(measures_noise=True)
    theta, sizes = theta_near(objective), objective.model.layout.sizes
    batches = [rows(seed, 2) for seed in range(4)]
    found = objective.evaluate(theta, batches)
    grads = torch.stack([brute_force(objective, theta, [one])[1] for one in batches])
    expected = [12.5**2 * 4 * part.var(0).mean(1) for part in grads.split(sizes, dim=2)]
    torch.testing.assert_close(found.grad_variance, torch.stack(expected, 1), rtol=1e-3, atol=0.0)


def test_halves_of_a_batch_give_the_variance_of_its_rows() -> None:
    objective = classifier(measures_noise=True)
    theta, sizes, one = theta_near(objective), objective.model.layout.sizes, rows(0, 5)
    found = objective.for_update([one], step=0)(theta, split_rows=True).grad_variance
    parts = [{name: value[part] for name, value in one.items()} for part in (slice(2), slice(2, 5))]
    first, second = (brute_force(objective, theta, [part])[1] for part in parts)
    difference = (first / 2 - second / 3).square()
    expected = [12.5**2 * 2 * 3 * part.mean(1) for part in difference.split(sizes, dim=1)]
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-3, atol=1e-9)


def test_a_stream_scales_by_the_terms_of_the_update() -> None:
    scale = DataScale(100.0, num_rows=None, num_terms=None, rows_per_update=8)
    assert scale.factor(torch.tensor([4.0, 8.0])).tolist() == [25.0, 12.5]


def test_dropout_masks_are_a_function_of_step_and_micro_batch() -> None:
    model = attach(with_lora(tiny_llama(attention_dropout=0.5)), num_members=2)
    objective = ModelObjective(model, DataScale(10.0, 8, 80, 4), dropout=True, seed=3)
    one = {**batch(seed=0, rows=4)}
    one["labels"] = one["input_ids"]

    def gradient(step: int) -> Tensor:
        grad = objective.for_update([one], step=step)(model.theta.detach()).grad_log_lik
        assert grad is not None
        return grad

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    theta = model.theta.detach()
    first, second = (next(objective.passes(theta, one, gradient=True, step=1, micro=micro)).grad for micro in (0, 1))
    assert not torch.equal(first, second)


def test_the_name_of_a_column_is_that_of_its_parameter() -> None:
    objective = classifier()
    names, sizes = objective.model.layout.names, objective.model.layout.sizes
    assert objective.place_of(0) == f", {names[0]}"
    assert objective.place_of(sizes[0]) == f", {names[1]}"
    assert objective.place_of(sum(sizes) - 1) == f", {names[-1]}"
