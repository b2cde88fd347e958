"""Products with the covariance of outputs, without forming it."""

from __future__ import annotations

import pytest

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.weight_laws import parts_of, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import normal


def source(scale: float = 1.0) -> LinearSource:
    layout = Layout(("w",), ((3, 4),))
    law = weight_law(normal(3, 4), None, parts_of(random_covariance("kronecker", layout), layout)["w"], None)
    return LinearSource(law.mean, normal(2, 4, seed=1).square(), normal(2, 4, seed=2), law, 0.5).scaled(scale)


def test_product_is_that_of_the_covariance() -> None:
    one, vectors = source(3.0), normal(2, 3, seed=3)
    expected = (one.covariance() @ vectors[..., None])[..., 0]
    assert (one.times(vectors) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert (one.covariance() - 9 * source().covariance()).abs().max() < 1e-12 * expected.abs().max()


def test_rows_are_chosen_in_every_part() -> None:
    chosen = source().leading(lambda part: part[1:])
    assert (chosen.covariance() - source().covariance()[1:]).abs().max() < 1e-12


@pytest.mark.parametrize("kind", COVARIANCES)
def test_rows_of_a_large_vocabulary_are_correlated(kind: str) -> None:
    layout = Layout(("w", "b"), ((100, 4), (100,)))
    parts = parts_of(random_covariance(kind, layout), layout)
    law = weight_law(normal(100, 4), normal(100), parts["w"], parts["b"])
    vectors = normal(2, 100, seed=3)
    for variance in (None, normal(2, 4, seed=1).square()):
        one = LinearSource(law.mean, variance, normal(2, 4, seed=2), law, 0.5)
        expected = (one.covariance() @ vectors[..., None])[..., 0]
        assert (one.times(vectors) - expected).abs().max() < 1e-12 * expected.abs().max()
