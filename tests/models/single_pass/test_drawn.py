"""The columns of whole models are the derivatives of their logits along draws of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.covariance import COVARIANCES, Covariance, Diagonal, Full, LowRank, dense
from hf_bayes.models.single_pass.drawn import LEADING, RANK, draws_of, leading_columns, rank_for
from scripts.reproduce.small_models import FAMILIES, attached, member_moments
from tests.members import subject_models
from tests.models.linear_cases import random_covariance
from tests.models.linearised.test_outputs import brute_force
from tests.models.single_pass.cases import DOUBLE, normal
from tests.models.single_pass.test_driver import run
from tests.tiny_models import inputs_of, tiny_bert, tiny_gpt2, tiny_llama, with_lora

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], str]] = FAMILIES | {
    "norms of bert": (lambda: tiny_bert(dtype=DOUBLE), r"layer\.0\..*LayerNorm|pooler"),
    "norms of llama": (lambda: tiny_llama(dtype=DOUBLE), r"norm"),
    "embedding": (lambda: tiny_bert(dtype=DOUBLE), r"word_embeddings"),
    "layers of gpt2": (lambda: tiny_gpt2(dtype=DOUBLE), r"h\.1\."),
    "layers of qwen3": (lambda: subject_models.qwen3(DOUBLE), r"layers\.0\."),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_columns_of_a_model_are_its_derivatives(name: str, attention: str) -> None:
    build, subspace = SUBJECTS[name]
    model = build()
    model.set_attn_implementation(attention)  # type: ignore[operator]
    inputs = inputs_of(model, padding="right")
    with attached(model, subspace, 1e-12) as bayesian:  # narrow: norms of wide inputs have other tangents
        spread = run(bayesian, inputs, rank=3).spread
        gaussian = bayesian.posterior.approximation
        draws = bayesian.layout.flatten(draws_of(gaussian.covariances[0], bayesian.layout, 3))
        size = 1e3  # of draws 1e-6 / sqrt(3) wide: the error of the step is 1e-6, of norms in float32 1e-7 / 6e-4
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


def swag_like(dim: int) -> LowRank:
    """A covariance with three wide directions of all parameters."""
    return LowRank.plus(torch.full((dim,), 2e-4, dtype=DOUBLE), 5e-3 * normal(dim, 3))


def test_leading_columns_and_the_remainder_are_the_covariance() -> None:
    covariance, like = swag_like(20), torch.zeros(1, dtype=DOUBLE)
    for rank, count in ((1, 1), (2, 2), (8, 3)):
        columns, remainder = leading_columns(covariance, rank)
        assert len(columns) == count
        found = columns.mT @ columns + dense(remainder, like)
        assert (found - dense(covariance, like)).abs().max() < 1e-12
    assert len(leading_columns(LowRank.less(torch.ones(5, dtype=DOUBLE), normal(5, 2)), 4)[0]) == 0  # narrower


def test_wide_directions_of_head_and_body_move_together() -> None:
    model = tiny_bert(dtype=DOUBLE)
    subspace = r"layer\.1\.output|classifier"
    covariance = swag_like(select(model, subspace).dim)
    inputs = inputs_of(model, rows=2)
    with attached(model, subspace, covariance=covariance) as bayesian:
        _, expected = member_moments(bayesian, inputs, 4000)
        spread = run(bayesian, inputs, rank=3).spread
    # 4,000 draws leave .022 in a variance, and curvature a few hundredths
    assert (spread.variance / expected - 1).abs().max() < 0.12
    assert torch.allclose(spread.covariance().diagonal(dim1=-2, dim2=-1), spread.variance)
    apart = spread.new(spread.held, replace(spread.outer, shared=0))
    assert (apart.variance / expected - 1).abs().max() > 0.12  # the head moves alone


def laplace_like(kind: str, jacobian: Tensor) -> Covariance:
    """The covariance (tau + N J'J)^-1, which the data have narrowed along a few directions of all parameters."""
    rows = 1e3 * jacobian.flatten(0, -2)
    tau = torch.full(jacobian.shape[-1:], 1e4, dtype=DOUBLE)
    return (
        LowRank.less(tau, rows.mT) if kind == "low_rank" else Full(torch.linalg.cholesky(tau.diag() + rows.mT @ rows))
    )


@pytest.mark.parametrize("kind", ["low_rank", "full"])
def test_narrow_directions_of_head_and_body_move_together(kind: str) -> None:
    model = tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6)
    subspace, inputs = r"layer\.1\.output|classifier", inputs_of(model, rows=2)
    layout = select(model, subspace)
    _, jacobian = brute_force(model, layout, inputs, initial(model, layout))
    covariance = laplace_like(kind, jacobian)
    expected = jacobian @ dense(covariance, jacobian) @ jacobian.mT
    with attached(model, subspace, covariance=covariance) as bayesian:
        spread = run(bayesian, inputs, rank=4000).spread
    size, vectors = expected.diagonal(dim1=-2, dim2=-1).max(), normal(2, 3)
    # 5 standard errors: sqrt(2 / 4,000)
    assert (spread.covariance() - expected).abs().max() < 0.11 * size
    assert (spread.variance - spread.covariance().diagonal(dim1=-2, dim2=-1)).abs().max() < 1e-10 * size
    product = (spread.covariance() @ vectors[..., None])[..., 0]
    assert (spread.times(vectors) - product).abs().max() < 1e-10 * size
    apart = spread.new(spread.held, replace(spread.outer, drawn=False))
    assert (apart.covariance() - expected).abs().max() > size  # head and body move independently


@pytest.mark.parametrize(("build", "width"), [(tiny_gpt2, "n_embd"), (tiny_llama, "hidden_size")])
def test_a_tied_head_moves_with_the_embeddings(build: Any, width: str) -> None:
    model = build(dtype=DOUBLE, tie_word_embeddings=True, **{width: 8})
    layout, inputs = select(model, "embed_tokens|wte"), inputs_of(model, rows=1)
    _, jacobian = brute_force(model, layout, inputs, initial(model, layout))
    covariance = Diagonal(torch.full((layout.dim,), 1e-6, dtype=DOUBLE))
    expected = (1e-6**2 * jacobian.square()).sum(-1)
    with attached(model, "embed_tokens|wte", covariance=covariance) as bayesian:
        spread = run(bayesian, inputs, rank=4000).spread
    # 5 standard errors: sqrt(2 / 4,000)
    assert ((spread.variance / expected).log().abs()).max() < 0.12
    apart = spread.new(spread.held, replace(spread.outer, drawn=False))
    assert ((apart.variance / expected).log().abs()).max() > 0.2  # the head moves alone


def test_a_head_without_correlation_has_its_exact_noise() -> None:
    model = tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6)
    subspace = r"layer\.1\.output|classifier"
    for kind, drawn in (("diagonal", False), ("kronecker", False), ("full", True)):
        covariance = random_covariance(kind, select(model, subspace))
        with attached(model, subspace, covariance=covariance) as bayesian:
            assert run(bayesian, inputs_of(model), rank=2).spread.outer.drawn is drawn
    dim = select(model, subspace).dim
    with attached(model, subspace, covariance=swag_like(dim)) as bayesian:
        assert not any(run(bayesian, inputs_of(model), rank=rank).spread.outer.drawn for rank in (2, 5))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_half_precision_models_have_float32_adapters(build: Any, dtype: torch.dtype, attention: str) -> None:
    variances = []
    for base in (torch.float32, dtype):
        model = with_lora(build())
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(base)
        model.set_attn_implementation(attention)  # type: ignore[operator]
        with attached(model, "trainable") as bayesian:
            spread = run(bayesian, inputs_of(model), rank=4).spread
            assert spread.moved.dtype == base
            variances.append(spread.variance.float().sum())
    assert abs(variances[1] / variances[0] - 1) < 0.05


def test_a_posterior_with_wide_directions_has_few_columns() -> None:
    assert rank_for(LowRank.plus(torch.ones(9, dtype=DOUBLE), normal(9, 8))) == LEADING
    assert rank_for(LowRank.plus(torch.ones(9, dtype=DOUBLE), normal(9, 7))) == RANK
    assert rank_for(LowRank.less(torch.ones(9, dtype=DOUBLE), normal(9, 5))) == RANK
    assert rank_for(Diagonal(torch.ones(9))) == RANK
