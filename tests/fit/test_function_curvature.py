from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.rng import generator
from hf_bayes.fit.function_curvature import curvature_of_function, outputs_of, row_gradients_of_function
from hf_bayes.uncertainty.likelihoods import Categorical, Normal
from hf_bayes.uncertainty.several_labels import Bernoulli

ROUNDING = 1e-12
"""Relative. All is float64, and no sum has more than a thousand terms."""


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator("curvature", *shape), dtype=torch.float64)


CLASSES = torch.arange(10) % 3
DATA = [(part, labels) for part, labels in zip(numbers(10, 3).split(4), CLASSES.split(4), strict=True)]


def dense(likelihood: Any, data: Any) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, list[Tensor]]:
    """Return (theta, x) -> outputs, theta [d], the Jacobian [N, C, d] of the outputs, and the outputs."""
    outputs, parameters = outputs_of(module())
    theta = torch.cat([value.flatten() for value in parameters.values()])

    def of(flat: Tensor, x: Tensor) -> Tensor:
        pieces = flat.split([value.numel() for value in parameters.values()])
        named = {n: p.view_as(v) for (n, v), p in zip(parameters.items(), pieces, strict=True)}
        return outputs(named, x)

    x = torch.cat([part for part, _ in data])
    return of, theta, torch.autograd.functional.jacobian(lambda flat: of(flat, x), theta), [of(theta, x)]


def test_the_ggn_is_its_definition() -> None:
    _, _, jacobian, (logits,) = dense(Categorical(), DATA)
    p = logits.softmax(1)
    expected = torch.einsum("ncd,nce,nef->df", jacobian, torch.diag_embed(p) - p[:, :, None] * p[:, None], jacobian)
    operator = curvature_of_function(*outputs_of(module()), DATA)
    assert torch.allclose(operator.matrix(), expected, rtol=ROUNDING, atol=ROUNDING * expected.abs().max())
    vectors = numbers(2, 5, operator.dim)
    assert torch.allclose(operator.product(vectors), vectors @ expected, atol=1e-10)


@pytest.mark.parametrize("likelihood", [Normal(0.5), Bernoulli()], ids=["normal", "bernoulli"])
def test_the_ggn_of_other_likelihoods_is_its_definition(likelihood: Any) -> None:
    labels = (numbers(10, 3) > 0).double()
    data = [(x, part) for (x, _), part in zip(DATA, labels.split(4), strict=True)]
    _, _, jacobian, (logits,) = dense(likelihood, data)
    p = logits.sigmoid()
    information = torch.full_like(p, 1 / 0.25) if isinstance(likelihood, Normal) else p * (1 - p)
    expected = torch.einsum("ncd,nc,ncf->df", jacobian, information, jacobian)
    found = curvature_of_function(*outputs_of(module()), data, likelihood=likelihood).matrix()
    assert torch.allclose(found, expected, rtol=1e-10, atol=ROUNDING * expected.abs().max())


def test_the_empirical_fisher_is_made_of_row_gradients() -> None:
    gradients = torch.cat(list(row_gradients_of_function(*outputs_of(module()), DATA)))
    of, theta, *_ = dense(Categorical(), DATA)
    x, labels = torch.cat([part for part, _ in DATA]), CLASSES
    for row in range(10):
        leaf = theta.clone().requires_grad_()
        log_prob = of(leaf, x[row : row + 1]).log_softmax(1)[0, labels[row]]
        assert torch.allclose(gradients[row], torch.autograd.grad(log_prob, leaf)[0], atol=ROUNDING)
    for estimator in ("ef_sequence", "ef_token"):
        found = curvature_of_function(*outputs_of(module()), DATA, estimator=estimator).matrix()
        assert torch.allclose(found, gradients.mT @ gradients, atol=1e-11)


def test_rows_and_terms_differ_where_a_row_has_several_labels() -> None:
    labels = torch.tensor([[0, 1, -100], [2, -100, 1]])
    data = [(numbers(2, 3, 3), labels)]
    of, theta, _, _ = dense(Categorical(), DATA)
    leaf = theta.clone()
    terms = torch.autograd.functional.jacobian(
        lambda flat: of(flat, data[0][0]).log_softmax(-1).gather(2, labels.clamp_min(0)[..., None])[..., 0], leaf
    )[labels >= 0]
    rows = terms.view(2, 2, -1).sum(1)
    for estimator, g in (("ef_token", terms), ("ef_sequence", rows)):
        found = curvature_of_function(*outputs_of(module()), data, estimator=estimator).matrix()
        assert torch.allclose(found, g.mT @ g, atol=1e-11)
    assert torch.allclose(next(row_gradients_of_function(*outputs_of(module()), data)), rows, atol=1e-11)


def test_the_hessian_is_the_second_derivative() -> None:
    of, theta, *_ = dense(Categorical(), DATA)
    x = torch.cat([part for part, _ in DATA])
    expected = torch.autograd.functional.hessian(
        lambda flat: nn.functional.cross_entropy(of(flat, x), CLASSES, reduction="sum"), theta
    )
    found = curvature_of_function(*outputs_of(module()), DATA, estimator="hessian").matrix()
    assert torch.allclose(found, expected, atol=1e-11)


@pytest.mark.statistics
def test_sampled_labels_average_to_the_ggn() -> None:
    exact = curvature_of_function(*outputs_of(module()), DATA).matrix()
    sampled = curvature_of_function(*outputs_of(module()), DATA, num_samples=4000)
    error = (sampled.matrix() - exact).norm() / exact.norm()
    assert error < 0.05  # one draw has a relative error near 1: 1 / sqrt(4000) is .016, and 3 of them
    # the broken twin: the data's labels in place of drawn ones
    empirical = curvature_of_function(*outputs_of(module()), DATA, estimator="ef_sequence").matrix()
    assert (empirical - exact).norm() / exact.norm() > 0.2
    assert torch.equal(sampled.product(exact[0]), sampled.product(exact[0]))  # the draws do not change


def test_inputs_may_be_keyword_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module()

        def forward(self, *, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    data = [({"x": x}, labels) for x, labels in DATA]
    expected = curvature_of_function(*outputs_of(module()), DATA).matrix()
    assert torch.equal(curvature_of_function(*outputs_of(Named()), data).matrix(), expected)
    assert next(row_gradients_of_function(*outputs_of(Named()), data)).shape == (4, 31)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: curvature_of_function(*outputs_of(module()), iter(DATA)), "can be read only once: give a list"),
        (lambda: curvature_of_function(*outputs_of(module()), DATA, estimator="gnn"), "estimator must be one of ggn"),
        (lambda: curvature_of_function(lambda t, x: x, torch.ones(3), DATA), "theta must be a dictionary"),  # type: ignore[arg-type]
        (lambda: outputs_of(module().requires_grad_(False)), "Sequential has no trainable parameter"),
    ],
)
def test_bad_input_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
