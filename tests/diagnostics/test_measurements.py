from __future__ import annotations

import dataclasses

import pytest

from hf_bayes.diagnostics.measurements import num_independent, pair_means
from tests.diagnostics.good_run import GOOD


def test_a_number_missing_for_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance needs one number per chain: got 3, distance has 4"):
        dataclasses.replace(GOOD, acceptance=[0.8] * 3)


def test_mirrored_chains_count_in_pairs() -> None:
    assert [num_independent(chains, mirrored=True) for chains in (1, 2, 8, 9)] == [1, 1, 4, 5]
    assert num_independent(8, mirrored=False) == 8
    assert pair_means([1.0, 3.0, 4.0], mirrored=True) == [2.0, 4.0]
    assert pair_means([1.0, 3.0, 4.0], mirrored=False) == [1.0, 3.0, 4.0]
