"""Campaigns through ``BayesianTrainer.save_model``: it replaces tensors, tokenizer and chat template in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.children import told_by

KILLS, READS, LIMITS = 200, 300, 24
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("tests.faults.saves", tmp_path_factory.mktemp("saves"), KILLS, READS, LIMITS, 0)


def broken(tally: dict[str, int]) -> int:
    return sum(count for outcome, count in tally.items() if outcome.startswith("broken"))


@pytest.mark.reliability("F1")
def test_no_kill_of_200_parts_a_tokenizer_from_its_posterior(
    result: dict[str, Any], injected: Callable[[int], None]
) -> None:
    injected(KILLS)
    tally = result["save_model"]["kills"]
    assert set(tally) == {"one", "other"}
    assert sum(tally.values()) == KILLS


@pytest.mark.reliability("F1")
def test_no_reader_of_300_finds_parts_of_two_saves(result: dict[str, Any], injected: Callable[[int], None]) -> None:
    injected(READS)
    tally = result["save_model"]["reads"]
    assert set(tally) == {"one", "other"}
    assert sum(tally.values()) == READS


@pytest.mark.reliability("F2")
def test_no_size_limit_of_24_leaves_a_cut_tokenizer(result: dict[str, Any], injected: Callable[[int], None]) -> None:
    injected(LIMITS)
    assert result["save_model"]["limits"] == {"refused": LIMITS}


@pytest.mark.reliability("F1", twin=True)
def test_a_tokenizer_written_after_the_commit_is_caught(result: dict[str, Any]) -> None:
    assert broken(result["twin"]["kills"]) > 0
    assert broken(result["twin"]["reads"]) > 0


@pytest.mark.reliability("F2", twin=True)
def test_a_tokenizer_cut_by_a_full_disk_is_caught(result: dict[str, Any]) -> None:
    assert broken(result["twin"]["limits"]) > 5
