from __future__ import annotations

import pytest

from tests.objectives.curvature_problems import evaluated, run

pytestmark = pytest.mark.models


def test_random_signs_and_labels_average_to_the_exact_curvature() -> None:
    made, _ = evaluated("gpt2", "head", "lm")
    for estimator in ("ef_token", "ggn"):
        exact = run(made, estimator=estimator, num_samples=None, structure="full", gradient=False).curvature.dense()
        mean = run(made, estimator=estimator, num_samples=400, structure="full", gradient=False).curvature.dense()
        # an outer product differs from its mean about as much as its mean is large; 3 rows x 400 draws
        assert float((mean - exact).norm() / exact.norm()) < 4 / (3 * 400) ** 0.5
        other = run(made, estimator="ef_sequence", structure="full", gradient=False).curvature.dense()
        assert float((other - exact).norm() / exact.norm()) > 4 / (3 * 400) ** 0.5  # the broken twin
