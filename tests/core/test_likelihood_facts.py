from __future__ import annotations

import pytest

from hf_bayes.core.likelihood_facts import LikelihoodFacts


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (LikelihoodFacts(3, 2), 6),
        (LikelihoodFacts(), None),
        (LikelihoodFacts(most_terms=3), None),
        (LikelihoodFacts(root_columns=2), None),
    ],
)
def test_an_exact_ggn_takes_a_vjp_for_each_term_and_column(facts: LikelihoodFacts, expected: int | None) -> None:
    assert facts.exact_vjps == expected
