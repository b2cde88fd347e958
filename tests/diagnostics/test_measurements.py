from __future__ import annotations

import dataclasses

import pytest

from tests.diagnostics.good_run import GOOD


def test_a_number_missing_for_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance needs one number per chain: got 3, distance has 4"):
        dataclasses.replace(GOOD, acceptance=[0.8] * 3)
