"""What likelihoods tell estimators: scores, roots of the Fisher information, labels of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.likelihood import Bernoulli, Categorical, Likelihood, Normal
from hf_bayes.rng import generator

LIKELIHOODS: dict[str, tuple[Likelihood, Tensor]] = {
    "categorical": (Categorical(), torch.tensor([2, 0, 1])),
    "bernoulli": (Bernoulli(), torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1]])),
    "normal": (Normal(0.7), torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.1, 0.2], [1.0, 1.0, -1.0]]).double()),
}
likelihoods = pytest.mark.parametrize(("likelihood", "labels"), LIKELIHOODS.values(), ids=LIKELIHOODS.keys())


def logits() -> Tensor:
    return torch.randn(3, 3, generator=generator("logits"), dtype=torch.float64)


@likelihoods
def test_the_score_is_the_gradient_of_the_log_probability(likelihood: Likelihood, labels: Tensor) -> None:
    leaf = logits().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.log_prob(leaf[None], labels[None]).sum(), leaf)
    assert torch.allclose(likelihood.score(leaf.detach(), labels), expected, atol=1e-12)


@likelihoods
def test_the_root_is_one_of_minus_the_hessian(likelihood: Likelihood, labels: Tensor) -> None:
    def value(one: Tensor) -> Tensor:
        return -likelihood.log_prob(one[None, None], labels[None, :1]).sum()

    expected = torch.autograd.functional.hessian(value, logits()[0])
    columns = torch.stack([likelihood.fisher_root(logits(), output)[0] for output in range(3)])
    assert torch.allclose(columns.T @ columns, expected, atol=1e-12)


@likelihoods
def test_scores_at_drawn_labels_have_mean_zero_and_the_fisher_information(
    likelihood: Likelihood, labels: Tensor
) -> None:
    count = 20_000
    many = logits()[:1].expand(count, 3)
    shape = (count, 3) if likelihood.labels_per_output else (count,)
    uniforms = torch.rand(shape, generator=generator("uniforms"), dtype=torch.float64)
    scores = likelihood.score(many, likelihood.draw(many, uniforms))
    columns = torch.stack([likelihood.fisher_root(logits(), output)[0] for output in range(3)])
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
