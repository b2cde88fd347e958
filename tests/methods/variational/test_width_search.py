from __future__ import annotations

import math

import numpy as np
import pytest

from hf_bayes.core.types import RowScores
from hf_bayes.methods.variational.width_search import FACTOR, INDIFFERENT, WidthCheck, check_width, largest_width


def bisected(limit: float, start: float = 1.0, num_checks: int = 7) -> list[WidthCheck]:
    return largest_width(lambda width: WidthCheck(width, 0.0, 0.0, width <= limit), start, num_checks=num_checks)


@pytest.mark.parametrize("limit", [0.02, 0.9, 1.0, 37.0])
def test_the_largest_width_that_passes_is_bracketed(limit: float) -> None:
    checks = bisected(limit)
    low = max(check.width for check in checks if check.passes)
    high = min(check.width for check in checks if not check.passes)
    assert low <= limit < high
    brackets = 1 + math.ceil(abs(math.log(limit, FACTOR)) + 1e-9)
    assert high / low == pytest.approx(FACTOR**0.5 ** (7 - brackets), rel=0.01)


def test_every_width_may_pass_or_fail() -> None:
    assert [check.width for check in bisected(math.inf, num_checks=3)] == [1, FACTOR, FACTOR**2]
    assert [check.width for check in bisected(0.0, num_checks=3)] == [1, 1 / FACTOR, 1 / FACTOR**2]


def scores(nll: np.ndarray) -> RowScores:
    return RowScores(nll, np.full(len(nll), 3))


def test_the_tolerance_is_a_standard_error_paired_by_row() -> None:
    rng = np.random.default_rng(0)
    point = 3 * rng.exponential(size=400)  # rows differ by far more than two predictions of a row
    noise = rng.normal(size=400)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    error = 0.01 / math.sqrt(400)
    for size, passes in ((0.9, True), (1.1, False)):
        found = check_width(1.0, scores(point + 3 * (size * error + 0.01 * noise)), scores(point), tolerance=1.0)
        assert found.difference == pytest.approx(size * error)
        assert found.std_error == pytest.approx(error, rel=1e-3)
        assert found.passes == passes
    unpaired = math.sqrt(2) * point.std() / 3 / math.sqrt(400)  # the twin, which both differences would pass
    assert unpaired > 50 * error


def test_negligible_differences_pass_and_infinite_ones_do_not() -> None:
    point = np.linspace(0, 1, 50)
    for difference, passes in ((0.9 * INDIFFERENT, True), (1.1 * INDIFFERENT, False), (math.inf, False)):
        assert check_width(1.0, scores(point + 3 * difference), scores(point), tolerance=1.0).passes == passes
    assert check_width(1.0, scores(np.full(50, math.nan)), scores(point), tolerance=1.0).passes is False
