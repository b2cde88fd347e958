from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.variational.lora_coordinates import Coordinates, canonical, factor_pairs

A, B = "q.lora_A.default.weight", "q.lora_B.default.weight"
SHAPES = {A: (3, 5), B: (4, 3), "head.weight": (2, 4)}


def members(count: int = 2, *, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensor:
    dim = sum(torch.Size(shape).numel() for shape in shapes.values())
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tensors(theta: Tensor, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    parts = theta.split([torch.Size(shape).numel() for shape in shapes.values()], -1)
    return {name: part.unflatten(-1, shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def product(theta: Tensor, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensor:
    found = tensors(theta, shapes)
    return found[B] @ found[A]


def covariance_of_product(found: Coordinates, std: Tensor) -> Tensor:
    """Return the covariance [4 * 5, 4 * 5] of B' A' of the first member, for independent elements of A'."""
    b, variance = tensors(found.theta)[B][0], tensors(std)[A][0].square()
    of_inputs = torch.einsum("or,pr,ri->iop", b, b, variance)
    return torch.block_diag(*of_inputs).view(5, 4, 5, 4).permute(1, 0, 3, 2).reshape(20, 20)


def test_the_product_of_the_factors_does_not_change() -> None:
    theta = members()
    found = canonical(theta, SHAPES)
    assert (product(found.theta) - product(theta)).abs().max() < 1e-13  # float64 rounding
    b = tensors(found.theta)[B]
    squares = b.mT @ b
    assert (squares - torch.diag_embed(squares.diagonal(dim1=1, dim2=2))).abs().max() < 1e-13
    assert torch.equal(tensors(found.theta)["head.weight"], tensors(theta)["head.weight"])


def test_the_noise_of_the_product_is_isotropic_in_b() -> None:
    theta = members()
    found = canonical(theta, SHAPES)
    u = torch.linalg.svd(tensors(theta)[B][0], full_matrices=False)[0]
    expected = torch.kron(u @ u.T, torch.eye(5, dtype=torch.float64))
    assert (covariance_of_product(found, found.unit) - expected).abs().max() < 1e-12
    # the twin: s_i in place of 1 / s_i
    turned = torch.where(found.unit > 0, 1 / found.unit, 0.0)
    assert (covariance_of_product(found, turned) - expected).abs().max() > 0.1


def test_the_scale_of_the_factors_does_not_matter() -> None:
    theta = members()
    scaled = theta.clone()
    tensors(scaled)[A].div_(7)
    tensors(scaled)[B].mul_(7)
    one, other = canonical(theta, SHAPES), canonical(scaled, SHAPES)
    first, second = (covariance_of_product(found, found.unit) for found in (one, other))
    assert (first - second).abs().max() < 1e-12
    assert one.scale == pytest.approx(other.scale, rel=1e-12)
    noise = one.scale**2 * 3 * 5 * 2  # r n elements of E in each of two members
    assert noise == pytest.approx(float(product(theta).square().sum()), rel=1e-12)


def test_columns_that_b_lacks_have_no_noise() -> None:
    theta = members()
    tensors(theta)[B][:, :, 2] = tensors(theta)[B][:, :, 0]
    found = canonical(theta, SHAPES)
    assert (product(found.theta) - product(theta)).abs().max() < 1e-13
    assert torch.equal((tensors(found.unit)[A] > 0).all(2), torch.tensor([[True, True, False]] * 2))
    assert torch.equal(tensors(found.theta)[B][:, :, 2], torch.zeros(2, 4, dtype=torch.float64))
    assert (found.unit[:, 15:] == 0).all()  # B and the head are points
    assert torch.equal(found.layer.unique(), torch.tensor([-1, 0]))


def test_a_rank_above_the_number_of_outputs_is_padded() -> None:
    shapes = {A: (3, 5), B: (2, 3)}
    theta = members(shapes=shapes)
    found = canonical(theta, shapes)
    assert (product(found.theta, shapes) - product(theta, shapes)).abs().max() < 1e-13
    assert torch.equal((tensors(found.unit, shapes)[A] > 0).all(2), torch.tensor([[True, True, False]] * 2))


def test_factors_are_paired_by_layer() -> None:
    names = [
        "x.lora_A.d.weight",
        "x.lora_B.d.weight",
        "x.lora_B.d.bias",
        "e.lora_embedding_A.d",
        "e.lora_embedding_B.d",
    ]
    found = factor_pairs({**dict.fromkeys(names, (1, 1)), "y.lora_A.d.weight": (1, 1)})
    assert found == {"x": (names[0], names[1]), "e": (names[3], names[4])}


def test_adapters_without_effect_are_refused() -> None:
    theta = members()
    tensors(theta)[B].zero_()
    with pytest.raises(ValueError, match="every B of the LoRA is zero"):
        canonical(theta, SHAPES)
    with pytest.raises(ValueError, match=r"no pair of LoRA factors .*head\.weight.* give a model with a LoRA"):
        canonical(members(shapes={"head.weight": (2, 4)}), {"head.weight": (2, 4)})
