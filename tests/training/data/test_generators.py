from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hf_bayes.training.data.generators import seeded, seeded_batches, undisturbed
from tests.training.data.test_fingerprint import masking


@dataclass(frozen=True)
class Frozen:
    @functools.cached_property
    def later(self) -> int:
        return 1


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


GENERATORS = (
    lambda: torch.Generator().manual_seed(1),
    lambda: random.Random(1),
    lambda: np.random.RandomState(1),
    lambda: np.random.default_rng(1),
)


class Drawing:
    """A collator that holds a generator, and returns its next number."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.generator = make()

    def __call__(self, rows: Any = None) -> float:
        match self.generator:
            case torch.Generator():
                return torch.rand((), generator=self.generator).item()
            case random.Random():
                return self.generator.random()
            case other:
                return float(other.random())


class Wrapper:
    def __init__(self, collate: Any) -> None:
        self.collate = collate


@pytest.mark.parametrize("wrap", [lambda held: held, Wrapper, functools.partial, lambda held: held.__call__])
@pytest.mark.parametrize("make", GENERATORS)
def test_held_generators_are_seeded_and_go_on(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    collate, twin = Drawing(make), Drawing(make)
    found = []
    for _ in range(2):
        drawn = (collate() for _ in range(2))
        found.append(list(seeded_batches(drawn, 5, wrap(collate))))
        assert collate() == twin()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_what_a_frozen_holder_remembers_is_taken_away() -> None:
    holder = Frozen()
    with undisturbed(holder):
        assert holder.later == 1
    assert "later" not in vars(holder)


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
