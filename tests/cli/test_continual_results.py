from __future__ import annotations

import pytest

from hf_bayes.cli import continual_results

RESULTS = {
    "single": [[1.0, 9.0, 9.0], [9.0, 2.0, 9.0], [9.0, 9.0, 3.0]],
    "method": [[1.0, 8.0, 8.0], [1.5, 2.2, 8.0], [2.0, 2.6, 3.3]],
}


def test_forgetting_is_measured_against_single_episodes() -> None:
    assert continual_results.excess(RESULTS, "method") == pytest.approx([0.0, 0.35, (1.0 + 0.6 + 0.3) / 3])
    assert continual_results.forgotten(RESULTS, "method") == pytest.approx((1.0 + 0.4) / 2)
    assert "| method | 2.6333 | 0.6333 | 0.7000 | 0.3000 |" in continual_results.table(RESULTS)
