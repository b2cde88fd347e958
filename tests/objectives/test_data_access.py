from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hf_bayes.objectives.data_access import DataAccess


def batches(rows: Sequence[int]) -> list[dict[str, Any]]:
    return [{"rows": list(rows)}]


def rows_of(access: DataAccess) -> list[int]:
    (batch,) = access.batches(range(access.num_rows))
    return list(batch["rows"])


@pytest.mark.parametrize(("share", "number"), [(0.25, 5), (0.26, 6), (1e-9, 1)])
def test_a_part_has_different_rows_of_the_data(share: float, number: int) -> None:
    found = rows_of(DataAccess(batches, 20).part(share, seed=0))
    assert len(set(found)) == len(found) == number
    assert set(found) <= set(range(20))


def test_a_part_depends_on_the_seed_alone() -> None:
    access = DataAccess(batches, 20)
    first, again, other = (rows_of(access.part(0.5, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_the_whole_is_itself() -> None:
    access = DataAccess(batches, 20)
    assert access.part(1.0, seed=0) is access


def heldout_of(access: DataAccess) -> list[int]:
    assert access.heldout is not None
    (batch,) = access.heldout(range(access.num_heldout))
    return list(batch["rows"])


def test_few_heldout_rows_are_all_read_in_their_order() -> None:
    for most in (None, 20, 30):
        access = DataAccess(batches, 5).with_heldout(batches, 20, most=most, seed=0)
        assert heldout_of(access) == list(range(20))


def test_of_many_heldout_rows_a_random_part_is_read() -> None:
    first, again, other = (
        heldout_of(DataAccess(batches, 5).with_heldout(batches, 1000, most=100, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 100
    assert max(first) > 800  # not the first rows, which may be of one class
