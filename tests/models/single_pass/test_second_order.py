"""Columns and means of wide Gaussians behind elementwise functions, norms and attention, and through models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass import second_order
from hf_bayes.models.single_pass.activations import derivative
from hf_bayes.models.single_pass.driver import SinglePass
from hf_bayes.models.single_pass.second_order import (
    attention_columns,
    attention_shift,
    element_columns,
    with_drift,
)
from hf_bayes.models.single_pass.wide_norms import norm_columns
from scripts.reproduce.small_models import FAMILIES, adapted, attached, inputs_of, member_moments
from tests.members import subject_models
from tests.models.single_pass.cases import normal


def draws(mean: Tensor, columns: Tensor, count: int) -> Tensor:
    """Draws [count, *shape] of a Gaussian by antithetic pairs, so that the first order cancels."""
    noise = torch.einsum("ns,s...->n...", normal(count // 2, len(columns), seed=7), columns)
    return torch.cat([mean + noise, mean - noise])


def test_columns_behind_a_square_are_exact() -> None:
    mean, columns = normal(5), normal(3, 5, seed=1)
    found, variance = element_columns(torch.square, mean, with_drift(columns)), columns.square().sum(0)
    assert (found[-1] - variance).abs().max() < 1e-12
    expected = 4 * mean.square() * variance + 2 * variance.square()
    assert (found[:-1].square().sum(0) / expected - 1).abs().max() < 1e-12


@pytest.mark.parametrize("std", [0.1, 1.0])
@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.tanh])
def test_moments_behind_activations_are_those_of_draws(function: Callable[[Tensor], Tensor], std: float) -> None:
    mean, columns = torch.linspace(-3, 3, 20).double(), torch.full((1, 20), std).double()
    drift = 0.1 * normal(20, seed=2)
    values = function(draws(mean + drift, columns, 100_000))
    found = element_columns(function, mean, with_drift(columns, drift))
    wanted = values.mean(0) - function(mean)
    assert (found[-1] - wanted).norm() < 0.05 * wanted.norm()  # 1 % of noise, and seven nodes
    assert 0.97 < found[:-1].square().sum() / values.var(0).sum() < 1.03


def test_a_wide_tanh_does_not_have_the_slope_at_its_mean() -> None:
    mean, columns = torch.linspace(-1, 1, 20).double(), torch.full((1, 20), 2.0).double()
    variance = torch.tanh(draws(mean, columns, 10_000)).var(0).sum()
    found = element_columns(torch.tanh, mean, with_drift(columns))
    assert 0.85 < found[:-1].square().sum() / variance < 1.15  # seven nodes
    assert (derivative(torch.tanh, mean) * columns).square().sum() / variance > 3


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("size", [0.1, 1.0])
def test_shifts_of_norms_are_those_of_draws(centred: bool, size: float) -> None:
    mean, columns, gain = normal(4, 32), size / 8**0.5 * normal(8, 4, 32, seed=1), normal(32, seed=2)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (32,), gain, eps=1e-6) if centred else F.rms_norm(x, (32,), gain, eps=1e-6)

    wanted = norm(draws(mean, columns, 20_000)).mean(0) - norm(mean)
    found = norm_columns(mean, with_drift(columns), gain, 1e-6, centred=centred)[-1]
    # the noise is as large as the mean for size 1; without a shift the error is 1
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_between(q, k) @ v


def weights_between(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)


def test_shift_of_attention_is_half_its_second_derivative() -> None:
    means = [normal(3, 4, seed=i) for i in range(3)]
    columns = [1e-3 * normal(1, 3, 4, seed=i) for i in range(3, 6)]
    ahead, here, behind = (
        attention(*(m + step * c[0] for m, c in zip(means, columns, strict=True))) for step in (10, 0, -10)
    )
    wanted = (ahead + behind - 2 * here) / 200
    pairs = [(mean, with_drift(column)) for mean, column in zip(means, columns, strict=True)]
    for shared in (0, 1):  # a draw, or a leading column
        found = attention_columns(weights_between, 1.0, *pairs, shared)[-1]
        assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()  # the square of the step 10 x 1e-3


NUM_COLUMNS = 512


def error_of_wide_attention() -> float:
    """Return the error of the mean behind attention whose scores have a standard deviation near 1, over its norm."""
    means = [normal(7, 4, seed=i) for i in range(3)]
    roots = [0.5 * normal(20, 7, 4, seed=i) / 20**0.5 for i in range(3, 6)]  # 20 sources, common to all three
    noise, drawn = normal(20_000, 20, seed=6), normal(NUM_COLUMNS, 20, seed=8) / NUM_COLUMNS**0.5
    values = attention(*(m + torch.einsum("ns,std->ntd", noise, r) for m, r in zip(means, roots, strict=True)))
    pairs = [(m, with_drift(torch.einsum("ns,std->ntd", drawn, r))) for m, r in zip(means, roots, strict=True)]
    drift = attention_columns(weights_between, 1.0, *pairs)[-1]
    return float((attention(*means) + drift - values.mean(0)).norm() / values.mean(0).norm())


def test_wide_attention_has_the_mean_of_draws() -> None:
    assert error_of_wide_attention() < 0.05  # the error of 512 draws and their mirror images is .02


def test_second_derivatives_miss_the_mean_of_wide_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def along(weights_of: Any, here: Tensor, pairs: Any, index: int, step: float) -> Tensor:
        return attention_shift(weights_of, here, pairs, index, 1e-3)

    monkeypatch.setattr(second_order, "attention_shift", along)
    assert error_of_wide_attention() > 0.1


def logits_of(bayesian: object, inputs: dict[str, Tensor], *, second_order: bool) -> Tensor:
    gaussian = bayesian.posterior.approximation  # type: ignore[attr-defined]
    one = SinglePass(
        bayesian.members,
        gaussian.means[0],
        gaussian.covariances[0],
        rank=128,
        second_order=second_order,  # type: ignore[attr-defined]
    )
    with torch.no_grad(), one.open():
        return one.mean(bayesian.members.forward(inputs).logits)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("family", ["bert", "vit", "llama", "gpt2"])
def test_second_order_changes_nothing_without_variance(family: str) -> None:
    build, subspace = FAMILIES[family]
    model = build()
    inputs = inputs_of(model)
    with torch.no_grad():
        expected = model(**inputs).logits
    with attached(model, subspace, 0.0) as bayesian:
        assert torch.equal(logits_of(bayesian, inputs, second_order=True), expected)


@pytest.mark.parametrize("length", [1, 6, 21])
def test_second_order_changes_no_fused_layers_without_variance(length: int) -> None:
    model = adapted(subject_models.named("Phi3", num_key_value_heads=2)(torch.float32), "qkv_proj", "down_proj").float()
    inputs = inputs_of(model, length=length)
    with torch.no_grad():
        expected = model(**inputs).logits
    with attached(model, "trainable", 0.0) as bayesian:
        assert torch.equal(logits_of(bayesian, inputs, second_order=True), expected)


def test_drifts_are_zero_for_means_in_any_order() -> None:
    mean = normal(3, 7, 4, 24, seed=1).float().transpose(1, 2)  # heads, or halves, of one fused layer
    pairs = [(part, with_drift(torch.zeros(2, *part.shape))) for part in mean.split(8, -1)]
    assert not attention_columns(weights_between, 1.0, *pairs).any()
    for part, moved in pairs:
        assert not any(element_columns(function, part, moved).any() for function in (F.silu, F.gelu, torch.tanh))


def test_second_order_brings_the_mean_nearer_to_members() -> None:
    build, subspace = FAMILIES["llama"]
    model = build()
    inputs = inputs_of(model, rows=2)
    with attached(model, subspace, 1e-2) as bayesian:
        wanted, _variance = member_moments(bayesian, inputs, 1000)
        first, second = (logits_of(bayesian, inputs, second_order=flag) for flag in (False, True))
    assert (second - wanted).norm() < 0.5 * (first - wanted).norm()


def test_second_order_needs_columns() -> None:
    with attached(FAMILIES["head"][0](), "last_layer") as bayesian:
        gaussian = bayesian.posterior.approximation
        with pytest.raises(ValueError, match="second_order needs structure='low_rank', got 'diagonal'"):
            SinglePass(
                bayesian.members, gaussian.means[0], gaussian.covariances[0], structure="diagonal", second_order=True
            )
