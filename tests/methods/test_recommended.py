"""The method of a run for which none was chosen."""

from __future__ import annotations

import re

import pytest

from hf_bayes.core.config import MODE_PRIOR_SCALE
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.recommended import LEAST_UPDATES, on_ladder, recommended


def test_held_out_rows_choose_the_temperature() -> None:
    method, words = recommended(200)
    assert method == on_ladder()
    assert method.ladder == {
        "temperature": [1.0, 0.3, 0.1, 0.03], "prior_scale": [1.0, *[MODE_PRIOR_SCALE] * 3]
    }  # fmt: skip
    assert words == "no method was given: SGHMC, and 200 held-out rows choose T of 1, 0.3, 0.1, 0.03"
    assert recommended(40, unit="token")[0] == method  # a row of tokens has many terms


def test_a_large_set_of_held_out_rows_is_read_in_part() -> None:
    assert "SGHMC, and 600 held-out rows" in recommended(600)[1]
    assert "SGHMC, and 600 of 5000 held-out rows" in recommended(5000)[1]
    assert "SGHMC, and 120 of 240 held-out rows" in recommended(240, unit="token")[1]


@pytest.mark.parametrize(
    ("rows", "unit", "processes", "reason"),
    [
        (199, "example", 1, r"chosen on 200 held-out rows or more \(got 199\). Hold out more"),
        (39, "token", 1, r"chosen on 40 held-out rows or more \(got 39\)"),
        (None, "example", 1, r"chosen on 200 held-out rows or more \(got 0\)"),
        (1000, "example", 2, "there are 2 processes, and the temperature T of SGHMC is chosen in a run of one"),
    ],
)
def test_without_a_choice_it_is_an_ensemble(rows: int | None, unit: str, processes: int, reason: str) -> None:
    method, words = recommended(rows, unit=unit, num_processes=processes)
    assert method == EnsembleConfig(num_chains=4)
    assert words.startswith("no method was given: a deep ensemble of 4, because ")
    assert re.search(reason, words)


def test_packed_rows_do_not_count_as_updates() -> None:
    method, words = recommended(500, packs=True)
    assert method == EnsembleConfig(num_chains=4)
    assert "because packing changes the number of rows" in words
    assert recommended(500, packs=True, num_updates=LEAST_UPDATES)[0] == on_ladder()


def test_a_prior_that_is_a_posterior_is_not_widened() -> None:
    assert recommended(500, inherits=True)[0].ladder == {"temperature": [1.0, 0.3, 0.1, 0.03]}


def test_a_run_that_is_too_short_for_a_ladder_trains_an_ensemble() -> None:
    method, words = recommended(500, num_updates=LEAST_UPDATES - 1)
    assert method == EnsembleConfig(num_chains=4)
    assert words == (
        "no method was given: a deep ensemble of 4, because the run has 106 updates, and SGHMC needs 107. Train longer "
        "for draws of the posterior"
    )
    assert recommended(500, num_updates=LEAST_UPDATES)[0] == on_ladder()
