from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.passes import member_passes, value_and_gradient
from tests.objectives.classifier import CHAINS, classifier, rows, theta_near
from tests.tiny_models import tiny_bert

THETA = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


def loss_of(theta: Tensor) -> Tensor:
    """Return sum_i theta_i^3 for each row."""
    return theta.pow(3).sum(1)


@pytest.mark.parametrize("graph", [True, False])
def test_each_row_has_the_gradient_of_its_own_loss(graph: bool) -> None:
    with torch.set_grad_enabled(graph):
        value, gradient = value_and_gradient(loss_of, THETA)
    assert not value.requires_grad
    torch.testing.assert_close(value, torch.tensor([9.0, 26.0]))
    torch.testing.assert_close(gradient, 3 * THETA.square())


def test_without_a_gradient_no_graph_is_made() -> None:
    seen = []

    def watched(theta: Tensor) -> Tensor:
        seen.append(theta.requires_grad or torch.is_grad_enabled())
        return loss_of(theta)

    with torch.enable_grad():
        value, gradient = value_and_gradient(watched, THETA, gradient=False)
    assert seen == [False]
    assert gradient is None
    torch.testing.assert_close(value, torch.tensor([9.0, 26.0]))


def test_chains_with_rows_of_their_own_see_those_rows_only() -> None:
    objective = classifier(shared=False, members_per_pass=2)
    passes, batch = objective.passes, rows(0, 4 * CHAINS)
    chunks = passes.member_chunks(batch)
    assert chunks == [slice(0, 2), slice(2, 3)]
    assert passes.num_groups == CHAINS
    seen = [passes.rows_of(batch, members)["input_ids"] for members in chunks]
    assert torch.equal(torch.cat(seen), batch["input_ids"])
    assert [len(ids) for ids in seen] == [8, 4]


def test_by_default_all_members_pass_over_shared_rows() -> None:
    model = attach(tiny_bert(), subspace="last_layer", num_members=CHAINS)
    passes = member_passes(model)
    assert (passes.chains, passes.num_groups, passes.dropout) == (range(CHAINS), 1, False)
    assert passes.prepare(rows(0))["input_ids"].device == model.device
    assert member_passes(model, chains=range(1)).chains == range(1)


def test_a_copy_for_shared_rows_leaves_the_original_as_it_was() -> None:
    objective = classifier(shared=False)
    theta, batch, whole = theta_near(objective), rows(0, 4 * CHAINS), {"gradient": True, "step": 0, "micro": 0}
    common = replace(objective.passes, shared=True)
    assert (common.num_groups, objective.passes.num_groups) == (1, CHAINS)
    own = torch.cat([one.loss for one in objective.passes.of_batch(theta, batch, **whole)])
    of_all = torch.cat([one.loss for one in common.of_batch(theta, batch, **whole)])
    assert bool((of_all > own).all())  # minus the log-likelihood of three times as many rows
