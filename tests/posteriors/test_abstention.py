"""The stored rule of abstention."""

from __future__ import annotations

import pytest

from hf_bayes.posteriors.abstention import Abstention
from tests.faults.posteriors import config

RULE = Abstention(
    measure="total", threshold=0.4, error_rate=0.05, failure_rate=0.1, num_rows=400, answered=0.7,
    heldout_error_rate=0.03, num_members=3,
)  # fmt: skip


def test_a_rule_is_stored_with_the_config() -> None:
    assert Abstention.from_dict(config(abstention=RULE.to_dict()).abstention) == RULE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measure": "mood"}, r"abstention\.measure must be one of one_minus_confidence"),
        ({"threshold": "high"}, r"abstention\.threshold must be a finite number"),
        ({"threshold": float("inf")}, r"abstention\.threshold must be a finite number"),
        ({"temperature": 0.0}, r"abstention\.temperature must be > 0"),
        ({"error_rate": 1.0}, r"abstention\.error_rate must be a number between 0 and 1"),
        ({"answered": -0.1}, r"abstention\.answered must be a number from 0 to 1"),
        ({"num_rows": 0}, r"abstention\.num_rows must be an integer >= 1"),
        ({"num_members": -1}, r"abstention\.num_members must be an integer >= 0, or null"),
        ({"prediction": "votes"}, r"abstention\.prediction must be one of members"),
        ({"more": 1}, "abstention must be the keys"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Abstention.from_dict({**RULE.to_dict(), **changes})
