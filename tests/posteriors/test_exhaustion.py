"""Loading a bad directory ends at once, with little memory and a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.children import told_by
from tests.faults.exhaustion import LARGE, SECONDS, attacks

WITHOUT_EFFECT = {"parent_library imports"}
"""Attacks on fields that are dropped, so that the posterior is the one that was saved."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("tests.faults.exhaustion", tmp_path_factory.mktemp("exhaustion"), "small")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("tests.faults.exhaustion", tmp_path_factory.mktemp("exhaustion"), "large")


def check(attack: str, found: dict[str, Any]) -> None:
    assert found["model"][0] == ("accepted" if attack in WITHOUT_EFFECT else "refused")
    # without a base model, or for the adapter alone, the wrong part may never be read
    assert {result for result, _ in found.values()} <= {"accepted", "refused"}
    assert max(seconds for _, seconds in found.values()) < SECONDS


def test_a_good_directory_is_loaded_within_the_same_limits(small: dict[str, Any]) -> None:
    assert {way: result for way, (result, _) in small["nothing"].items()} == {
        "Posterior": "accepted", "model": "accepted", "adapter": "accepted",
    }  # fmt: skip


@pytest.mark.parametrize("attack", [name for name, _ in attacks() if name not in LARGE])
def test_a_bad_directory_ends_within_5_s_and_1_gb(attack: str, small: dict[str, Any]) -> None:
    check(attack, small[attack])


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(LARGE))
def test_a_large_bad_directory_ends_within_5_s_and_1_gb(attack: str, large: dict[str, Any]) -> None:
    check(attack, large[attack])
