from __future__ import annotations

import math
from typing import Any

import pytest

from hf_bayes.uncertainty.colour_scale import NUM_LEVELS, Scale, nats, scale_of


def record(*epistemic: float, num_members: int | None = 4) -> dict[str, Any]:
    return {"tokens": [{"epistemic": value} for value in epistemic], "num_members": num_members}


@pytest.mark.parametrize(
    ("value", "level"), [(-1e-7, 0), (0.0, 0), (0.25, NUM_LEVELS / 2), (1.0, NUM_LEVELS), (9.0, NUM_LEVELS)]
)
def test_the_level_grows_with_the_square_root(value: float, level: float) -> None:
    assert scale_of([record(value)], "epistemic", None).level({"epistemic": value}) == level


def test_a_scale_counts_the_tokens_above_its_end() -> None:
    scale = scale_of([record(0.5, 2.0), record(3.0)], "epistemic", None)
    assert scale == Scale("epistemic", 1.0, num_above=2, num_tokens=3, num_members=4)
    assert scale.ticks == ["0", "0.25", "≥ 1 nat"]
    assert scale.legend == (
        "darkest = 1 nat (log 4 = 1.39 is the largest possible; 2 of 3 tokens are above it, and drawn as dark)"
    )


def test_a_bound_is_stated_for_a_known_number_of_members_only() -> None:
    scale = scale_of([record(0.5), record(0.5, num_members=8)], "epistemic", 2.0)
    assert scale.num_members is None
    assert (scale.legend, scale.ticks) == ("darkest = 2 nats", ["0", "0.5", "2 nats"])


def test_no_bound_is_stated_for_a_mixture_with_a_temperature() -> None:
    scale = scale_of([record(0.5), record(0.5) | {"mixture_temperature": 2.0}], "epistemic", None)
    assert (scale.num_members, scale.legend) == (None, "darkest = 1 nat")


@pytest.mark.parametrize(
    ("measure", "vmax", "message"),
    [
        ("entropy", None, "measure is one of total, aleatoric, epistemic; got 'entropy'"),
        *(("total", bad, "vmax is the end of the colour scale") for bad in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_a_scale_without_a_meaning_is_refused(measure: str, vmax: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_of([record(0.5)], measure, vmax)


def test_one_nat_is_singular() -> None:
    assert (nats(1), nats(0.12345)) == ("1 nat", "0.123 nats")
