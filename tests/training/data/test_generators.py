from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch

from hf_bayes.training.data.generators import seeded, seeded_batches, undisturbed
from tests.training.data.test_fingerprint import masking


def numbers() -> list[float]:
    """The next number of each global generator."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def begin(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def three_batches() -> Iterator[list[float]]:
    for _ in range(3):
        yield numbers()


def test_attributes_that_appear_meanwhile_are_taken_away() -> None:
    collate = masking()
    with undisturbed(collate):
        collate.later, collate.generator = 1, torch.Generator()
    assert not hasattr(collate, "later")
    assert collate.generator is None


def test_seeded_draws_follow_from_the_seed_alone() -> None:
    found = []
    for state in (1, 2):
        begin(state)
        with seeded(5):
            found.append(numbers())
    assert found[0] == found[1]


def test_generators_go_on_after_seeded_draws() -> None:
    begin(1)
    expected = numbers()
    begin(1)
    with seeded(5):
        numbers()
    assert numbers() == expected


def test_seeded_batches_do_not_depend_on_draws_between_them() -> None:
    begin(1)
    alone = list(seeded_batches(three_batches(), 5))
    between, later = [], []
    begin(2)
    expected = [numbers() for _ in range(3)]
    begin(2)
    for batch in seeded_batches(three_batches(), 5):
        between.append(batch)
        later.append(numbers())
    assert between == alone
    assert later == expected
    assert alone[0] != alone[1] != alone[2]
