"""The scales of two factors: the minimum of the free energy along them, and what they leave as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Prior, Problem
from hf_bayes.distributions.energy import GaussianPrior, LaplacePrior
from hf_bayes.methods.variational.balance import Balance, balance_of
from hf_bayes.methods.variational.blob import LORA_B, BLoBConfig
from hf_bayes.methods.variational.gaussian_vi import gaussian_entropy
from hf_bayes.methods.variational.points import random_elements

SHAPES: Mapping[str, tuple[int, ...]] = {
    "q.lora_A.default.weight": (2, 3), "head": (4,), "q.lora_B.default.weight": (5, 2),
    "c.lora_A.default.weight": (2, 2, 3, 3), "c.lora_B.default.weight": (4, 2, 1, 1),
}  # fmt: skip
DIM = sum(math.prod(shape) for shape in SHAPES.values())
STD = torch.rand(DIM, generator=generator("std"), dtype=torch.float64) + 0.5
PRIOR = GaussianPrior(torch.zeros((), dtype=torch.float64), STD)


def problem(prior: Prior = PRIOR) -> Problem:
    return Problem(1, prior, 0.01, 10, 0, SHAPES)


def mask(points: str) -> Tensor:
    found = random_elements("blob", points, SHAPES)
    assert found is not None
    return found


def balance(points: str = LORA_B, *, weight: float = 1.0, temperature: float = 1.0) -> Balance:
    found = balance_of(problem(), mask(points), prior_weight=weight, temperature=temperature)
    assert found is not None
    return found


def members(seed: str, count: int = 3) -> Tensor:
    return torch.randn(count, DIM, generator=generator(seed), dtype=torch.float64)


def parts(theta: Tensor) -> dict[str, Tensor]:
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    return {
        name: part.reshape(-1, *shape)
        for (name, shape), part in zip(SHAPES.items(), theta.split(sizes, 1), strict=True)
    }


def products(theta: Tensor) -> Tensor:
    """Return the numbers [M, ...] of theta that the model depends on: B A of each layer, and the rest."""
    of = {name: part.flatten(2) if part.ndim > 2 else part for name, part in parts(theta).items()}
    layers = [of[f"{layer}.lora_B.default.weight"] @ of[f"{layer}.lora_A.default.weight"] for layer in "qc"]
    return torch.cat([*(layer.flatten(1) for layer in layers), of["head"]], 1)


@pytest.mark.parametrize("points", [LORA_B, "lora_A", "head"])
def test_scales_minimise_the_free_energy(points: str) -> None:
    weight, temperature, is_random = 0.7, 0.7, mask(points)
    mean, std = members("mean"), members("log std").exp() * is_random
    found = balance(points, weight=weight, temperature=temperature)
    scales = [part.requires_grad_() for part in found.log_scales(mean, std.square())]
    scale = torch.ones_like(mean)
    for pair, log_scale in zip(found.pairs, scales, strict=True):
        of_a = log_scale.repeat_interleave(math.prod(pair.shape_a[1:]), 1)
        of_b = -log_scale.repeat(1, pair.shape_b[0])
        scale = scale.slice_scatter(of_a.exp(), 1, pair.a.start, pair.a.stop)
        scale = scale.slice_scatter(of_b.exp(), 1, pair.b.start, pair.b.stop)
    assert torch.allclose(scale, found.scale(scales, mean))
    torch.testing.assert_close(products(scale * mean), products(mean))  # the model does not change

    def gradients(temperature: float) -> float:
        energy = 0.5 * weight * (scale.square() * (mean.square() + std.square()) / STD.square()).sum()
        entropy = (scale.log() * is_random).sum()
        found = torch.autograd.grad(energy - temperature * entropy, scales, retain_graph=True)
        return max(float(part.abs().max()) for part in found)

    assert gradients(temperature) < 1e-9  # rounding of float64, in numbers up to 1e3
    assert gradients(1.1 * temperature) > 0.1  # the twin: another weight of the entropy


def test_a_start_with_zeros_has_finite_scales() -> None:
    for points in (LORA_B, "lora_A", "head"):
        found = balance(points).log_scales(torch.zeros(1, DIM), 1e-4 * mask(points)[None])
        assert all(part.isfinite().all() for part in found)
    both = mask("lora_")
    assert balance_of(problem(), both, prior_weight=1.0, temperature=1.0) is None  # points that are 0 have no scale


def test_an_update_reports_the_free_energy_of_both_factors() -> None:
    config, rngs = BLoBConfig(num_draws=1, temperature=0.5, temper="likelihood"), [generator(0, "chain", 0)]
    rule = config.build(problem())
    theta, state = rule.locate(rule.init(members("start", 1), rngs), rngs)  # type: ignore[union-attr, arg-type]
    found = balance(weight=0.5, temperature=0.5)
    scale = found.scale(found.log_scales(state.iterate[:, 0], (2 * state.iterate[:, 1]).exp()), theta)
    log_stds = (scale.log() + math.log(config.init_std)) * mask(LORA_B)
    entropy = gaussian_entropy(log_stds.sum(1), int(mask(LORA_B).sum()))
    expected = 3.0 - 0.5 * PRIOR.log_prob(scale * theta) - 0.5 * entropy
    _, info = rule.update(state, Evaluation(torch.full((1,), -3.0), -theta), 1e-9, rngs)  # type: ignore[union-attr]
    torch.testing.assert_close(info["free_energy"], expected, check_dtype=False)


def test_other_priors_leave_the_factors_alone() -> None:
    one = torch.ones((), dtype=torch.float64)
    is_random, scales = mask(LORA_B), {"prior_weight": 1.0, "temperature": 1.0}
    centred_elsewhere = torch.zeros(DIM, dtype=torch.float64)
    centred_elsewhere[0] = 1.0  # as with prior_mean="initial"
    for prior in (LaplacePrior(0 * one, one), GaussianPrior(centred_elsewhere, one)):
        assert balance_of(problem(prior), is_random, **scales) is None
    assert balance_of(problem()._replace(shapes={"a": (3,), "b": (DIM - 3,)}), is_random, **scales) is None
