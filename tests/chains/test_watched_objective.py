from __future__ import annotations

import torch

from hf_bayes.chains.watched_objective import WatchedObjective
from hf_bayes.core.types import Evaluation
from tests.chains.normal_objective import NormalObjective, OfUpdate


def test_the_first_and_the_last_loss_are_kept() -> None:
    watched = WatchedObjective(OfUpdate(NormalObjective(), 1))
    assert watched.first is None
    found = [watched(torch.full((2, 15), size)) for size in (1.0, 2.0, 3.0)]
    assert watched.first is found[0].loss
    assert watched.last is found[2].loss
    assert found[2].loss is not None
    assert found[2].loss.tolist() == [67.5, 67.5]  # 15 * 9 / 2


def test_only_the_first_evaluation_is_checked() -> None:
    seen: list[tuple[torch.Tensor, Evaluation]] = []
    watched = WatchedObjective(OfUpdate(NormalObjective(), 1), lambda theta, found: seen.append((theta, found)))
    first = torch.ones(2, 15)
    found = watched(first, gradient=False)
    watched(torch.zeros(2, 15))
    assert len(seen) == 1
    assert seen[0][0] is first
    assert seen[0][1] is found
    assert found.grad_log_lik is None
