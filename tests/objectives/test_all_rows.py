"""The gradient of all rows is the mean of the gradients of random batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_bayes.objectives.data_access import DataAccess
from tests.objectives.classifier import CHAINS, brute_force, classifier, rows, theta_near

DATA = rows(0, 40)


def by_number(numbers: Sequence[int]) -> Any:
    """Return rows of the data in batches of at most 12."""
    return ({name: value[torch.tensor(some)] for name, value in DATA.items()} for some in _parts(list(numbers)))


def _parts(numbers: list[int]) -> list[list[int]]:
    return [numbers[start : start + 12] for start in range(0, len(numbers), 12)]


def test_it_is_the_sum_over_rows_for_chains_with_own_batches() -> None:
    objective = classifier(shared=False, data=DataAccess(by_number, 40))
    theta = theta_near(objective)
    found = objective.full_gradient(theta)
    expected = brute_force(objective, theta, [DATA])[1]
    torch.testing.assert_close(found, 100 / 40 * expected, rtol=1e-4, atol=1e-4)
    assert not objective.passes.shared


def test_updates_have_it_as_their_mean() -> None:
    objective = classifier(data=DataAccess(by_number, 40))
    theta = theta_near(objective)
    updates = [by_number(range(start, start + 8)) for start in range(0, 40, 8)]
    grads = torch.stack([objective.evaluate(theta, list(update)).grad_log_lik for update in updates])
    found = objective.full_gradient(theta)
    torch.testing.assert_close(found, grads.mean(0), rtol=1e-4, atol=1e-4)


def test_there_is_none_without_rows_by_number() -> None:
    objective = classifier()
    assert objective.full_gradient(torch.zeros(CHAINS, 1)) is None


def test_there_is_none_of_rows_that_vary() -> None:
    objective = classifier(data=DataAccess(by_number, 40, varies=True))
    assert objective.full_gradient(theta_near(objective)) is None
