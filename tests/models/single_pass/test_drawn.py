"""The columns of whole models are the derivatives of their logits along draws of the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_bayes.core.layout import select
from hf_bayes.distributions.covariance import COVARIANCES
from hf_bayes.models.single_pass.drawn import draws_of
from tests.members import subjects
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import DOUBLE, attached
from tests.models.single_pass.test_driver import FAMILIES, run
from tests.tiny_models import inputs_of, tiny_bert, tiny_gpt2, tiny_llama

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], str]] = FAMILIES | {
    "norms of bert": (lambda: tiny_bert(dtype=DOUBLE), r"layer\.0\..*LayerNorm|pooler"),
    "norms of llama": (lambda: tiny_llama(dtype=DOUBLE), r"norm"),
    "embedding": (lambda: tiny_bert(dtype=DOUBLE), r"word_embeddings"),
    "layers of gpt2": (lambda: tiny_gpt2(dtype=DOUBLE), r"h\.1\."),
    "layers of qwen3": (lambda: subjects.qwen3(DOUBLE), r"layers\.0\."),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_columns_of_a_model_are_its_derivatives(name: str, attention: str) -> None:
    build, subspace = SUBJECTS[name]
    model = build()
    model.set_attn_implementation(attention)  # type: ignore[operator]
    inputs = inputs_of(model, padding="right")
    with attached(model, subspace) as bayesian:
        spread = run(bayesian, inputs, rank=3).spread
        gaussian = bayesian.posterior.approximation
        draws = bayesian.layout.flatten(draws_of(gaussian.covariances[0], bayesian.layout, 3))
        size = 0.1  # of draws 1e-2 / sqrt(3) wide: the error of the step is 1e-6, of norms in float32 1e-7 / 6e-4
        theta = torch.cat([gaussian.means + size * draws, gaussian.means - size * draws])
        with torch.no_grad(), bayesian.members.bind(theta):
            up, down = bayesian.members.logits(inputs).chunk(2)
    expected = (up - down) / (2 * size)
    assert expected.abs().max() > 0
    assert (spread.roots[:2] - expected[1:]).abs().max() > 0.1 * expected.abs().max()  # other draws
    assert (spread.roots - expected).abs().max() < 3e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", COVARIANCES)
def test_draws_have_the_covariance_of_the_posterior(kind: str) -> None:
    layout = select(tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6), "last_layer")
    covariance = random_covariance(kind, layout)
    rank = 20_000
    drawn = layout.flatten(draws_of(covariance, layout, rank))
    found = drawn.square().sum(0) / covariance.variance
    assert drawn.shape == (rank, layout.dim)
    assert (found - 1).abs().max() < 0.05  # 5 standard errors: sqrt(2 / 20,000)
