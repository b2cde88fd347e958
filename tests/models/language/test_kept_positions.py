from __future__ import annotations

import pytest
import torch

from hf_bayes.models.language.kept_positions import LogitsToKeep, kept_positions, num_last_kept

SELECTIONS: list[LogitsToKeep] = [
    0, 2, -2, slice(-2, None), slice(1, 5, 2), torch.tensor([0, 4]), torch.tensor([-1, -6]), torch.arange(6) > 3
]  # fmt: skip


@pytest.mark.parametrize("keep", SELECTIONS, ids=str)
def test_positions_are_those_that_transformers_indexes(keep: LogitsToKeep) -> None:
    hidden = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    expected = hidden[:, slice(-keep, None) if isinstance(keep, int) else keep]
    positions = kept_positions(keep, 6, torch.device("cpu"))
    assert torch.equal(hidden[:, positions], expected)
    assert bool((positions >= 0).all())


def test_the_last_positions_are_counted_for_a_number_alone() -> None:
    assert [num_last_kept(keep) for keep in SELECTIONS] == [0, 2, 0, 0, 0, 0, 0, 0]
