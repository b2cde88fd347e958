"""The parts of likelihoods that estimators use: scores, roots of the Fisher information, and drawn labels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.uncertainty.likelihoods import IGNORE, Categorical, Likelihood, Normal, next_tokens
from hf_bayes.uncertainty.several_labels import Bernoulli

LIKELIHOODS: dict[str, tuple[Likelihood, Tensor]] = {
    "categorical": (Categorical(), torch.tensor([2, 0, 1])),
    "bernoulli": (Bernoulli(), torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1]])),
    "normal": (Normal(0.7), torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.1, 0.2], [1.0, 1.0, -1.0]]).double()),
}
likelihoods = pytest.mark.parametrize(("likelihood", "labels"), LIKELIHOODS.values(), ids=LIKELIHOODS.keys())


def logits() -> Tensor:
    return torch.randn(3, 3, generator=generator("logits"), dtype=torch.float64)


def root(likelihood: Likelihood, at: Tensor) -> Tensor:
    """Return the columns of the roots, [columns, n, C]."""
    return torch.stack([likelihood.fisher_root(at, k) for k in range(likelihood.num_root_columns(at.shape[-1]))])


@likelihoods
def test_the_score_is_the_gradient_of_the_log_probability(likelihood: Likelihood, labels: Tensor) -> None:
    leaf = logits().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.log_prob(leaf[None], labels[None]).sum(), leaf)
    assert torch.allclose(likelihood.score(leaf.detach(), labels), expected, atol=1e-12)


@likelihoods
def test_the_parts_of_a_term_add_up_to_it(likelihood: Likelihood, labels: Tensor) -> None:
    parts = likelihood.log_prob_parts(logits()[None], labels[None])
    assert parts.shape == (1, 3, 3 if isinstance(likelihood, Bernoulli) else 1)
    assert torch.equal(parts.sum(-1), likelihood.log_prob(logits()[None], labels[None]))


@likelihoods
def test_the_root_is_one_of_minus_the_hessian(likelihood: Likelihood, labels: Tensor) -> None:
    def value(one: Tensor) -> Tensor:
        return -likelihood.log_prob(one[None, None], labels[None, :1]).sum()

    expected = torch.autograd.functional.hessian(value, logits()[0])
    columns = root(likelihood, logits())[:, 0]
    assert torch.allclose(columns.T @ columns, expected, atol=1e-12)


@pytest.mark.parametrize("num_classes", [1, 2, 5])
def test_a_root_of_classes_has_a_column_less_than_there_are(num_classes: int) -> None:
    at = torch.randn(4, num_classes, generator=generator("classes"), dtype=torch.float64)
    probs, columns = at.softmax(-1), root(Categorical(), at)
    assert len(columns) == max(1, num_classes - 1)
    fisher = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    assert torch.allclose(torch.einsum("kni,knj->nij", columns, columns), fisher, atol=1e-12)


@pytest.mark.parametrize("certain", [0, 1, 2, 3])
@pytest.mark.parametrize("gap", [20.0, 60.0, 95.0, 200.0, math.inf])
def test_the_root_of_a_certain_class_is_that_of_float64(certain: int, gap: float) -> None:
    """Check the root up to the smallest number of float32, where one class has a probability of nearly 1."""
    at = torch.tensor([[0.3, -0.4, 1.1, 0.0]]) - gap
    at[0, certain] = 0
    found, probs = root(Categorical(), at).double(), at.double().softmax(-1)
    assert found.isfinite().all()
    fisher = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    others = torch.arange(4) != certain
    fisher[0, certain, certain] = probs[0, certain] * probs[0, others].sum()  # 1 - p is rounding in float64, too
    size = fisher.diagonal(dim1=1, dim2=2).sqrt()
    # 100 roundings of float32 beside the two logits' own; what is denormal is rounded more, and below 1e-37
    limit = 1e-5 * size[:, :, None] * size[:, None] + 1e-37
    assert bool(((torch.einsum("kni,knj->nij", found, found) - fisher).abs() <= limit).all())


@likelihoods
def test_drawn_scores_have_mean_zero_and_the_fisher_covariance(likelihood: Likelihood, labels: Tensor) -> None:
    count = 20_000
    many = logits()[:1].expand(count, 3)
    shape = (count, 3) if likelihood.labels_per_output else (count,)
    uniforms = torch.rand(shape, generator=generator("uniforms"), dtype=torch.float64)
    scores = likelihood.score(many, likelihood.draw(many, uniforms))
    columns = root(likelihood, logits())[:, 0]
    fisher = columns.T @ columns
    limit = 4.5  # standard errors, the largest of 9
    spread = scores.std(0) / count**0.5
    assert (scores.mean(0).abs() / spread).max() < limit
    products = scores[:, :, None] * scores[:, None]
    off = (products.mean(0) - fisher).abs() / (products.std(0) / count**0.5).clamp_min(1e-12)
    assert off.max() < limit
    twin = likelihood.score(many, likelihood.draw(many, uniforms.square()))  # labels of another distribution
    assert (twin.mean(0).abs() / spread).max() > limit


@likelihoods
def test_uniforms_at_the_edges_give_labels(likelihood: Likelihood, labels: Tensor) -> None:
    for edge in (0.0, 1 - 2.0**-53):
        uniforms = torch.full((3, 3) if likelihood.labels_per_output else (3,), edge, dtype=torch.float64)
        assert likelihood.score(logits(), likelihood.draw(logits(), uniforms)).isfinite().all()


def test_low_precision_logits_are_widened_for_the_likelihood() -> None:
    logits, labels = torch.full((1, 1, 1), 1000.0, dtype=torch.bfloat16), torch.full((1, 1), 1001.0)
    assert Normal(1.0).log_prob(logits, labels).dtype == torch.float32
    expected = -0.5 - 0.5 * math.log(2 * math.pi)  # bfloat16 has no 1001
    assert math.isclose(float(Normal(1.0).log_prob(logits, labels)), expected, rel_tol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_predicts_nothing_and_is_no_target(side: str) -> None:
    pad = (2, 0) if side == "left" else (0, 2)
    alone = torch.arange(1, 6)[None]
    padded = torch.nn.functional.pad(alone, pad, value=9)
    mask = torch.nn.functional.pad(torch.ones_like(alone), pad)
    expected = torch.nn.functional.pad(next_tokens(alone, None), pad, value=IGNORE)
    assert torch.equal(next_tokens(padded, mask), expected)


def test_targets_after_a_cache_read_the_end_of_the_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]])  # two tokens are in a cache
    assert next_tokens(torch.arange(4)[None], mask).tolist() == [[1, 2, IGNORE, IGNORE]]
