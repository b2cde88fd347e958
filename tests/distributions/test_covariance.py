from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, Diagonal, Full, KroneckerBlock, LowRank, dense
from hf_bayes.posteriors.posterior import Posterior
from tests.distributions.covariance.structures import LAYOUT, kinds, make, numbers
from tests.faults import posteriors
from tests.faults.edits import edit_tensors, sign


@kinds
def test_everything_agrees_with_the_dense_matrix(kind: str) -> None:
    covariance, precision = make(kind)
    sigma = torch.linalg.inv(precision)
    vectors = numbers(3, LAYOUT.dim, seed=9)
    root = covariance.root(torch.eye(LAYOUT.dim).double()).T
    close = {"rtol": 1e-9, "atol": 1e-9}  # float64 solves of condition numbers below 1e5
    assert torch.allclose(dense(covariance, sigma), sigma, **close)
    assert torch.allclose(root @ root.T, sigma, **close)
    assert torch.allclose(covariance.precision_product(vectors), vectors @ precision, **close)
    assert torch.allclose(covariance.variance, sigma.diagonal(), **close)
    assert torch.allclose(covariance.precision_diagonal, precision.diagonal(), **close)
    assert torch.allclose(covariance.log_det, sigma.logdet(), **close)
    assert covariance.dim == LAYOUT.dim


class LargestOperand(TorchDispatchMode):
    """A mode that records the largest number of elements read by an operation; solvers count as they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if "solve_triangular" in str(
            func
        ):  # the solver copies each operand for every leading index of the other operand
            lead = torch.broadcast_shapes(*(leaf.shape[:-2] for leaf in given))
            given = [leaf.expand(*lead, *leaf.shape[-2:]) for leaf in given]
        self.numel = max([self.numel, *(leaf.numel() for leaf in given)])
        return func(*args, **(kwargs or {}))


@kinds
@pytest.mark.parametrize("question", ["root", "product", "precision_product"])
def test_leading_dimensions_do_not_multiply_the_factors(kind: str, question: str) -> None:
    covariance, _ = make(kind)
    vectors = numbers(6, 5, LAYOUT.dim, seed=9)
    with LargestOperand() as operands:
        found = getattr(covariance, question)(vectors)
    # of 30 vectors of 16 elements; a factor [16, 16] for each of the 6 rows would be 1536
    assert operands.numel <= vectors.numel()
    each = torch.stack([getattr(covariance, question)(vector[None])[0] for vector in vectors.flatten(0, 1)])
    assert torch.allclose(found.flatten(0, 1), each, rtol=1e-12)


def moment_error(kind: str, wrong: float = 1.0) -> float:
    """Return the error of the worst element of the sample covariance, in standard errors."""
    covariance, precision = make(kind)
    gaussian = Gaussian(torch.zeros(1, LAYOUT.dim, dtype=torch.float64), (covariance,))
    draws = gaussian.sample(20_000, generator("moments")) * wrong
    sigma = torch.linalg.inv(precision)
    variance = sigma.diagonal()[:, None] * sigma.diagonal() + sigma**2  # standard error of a product of two Gaussians
    return float(((draws.T @ draws / len(draws) - sigma).abs() / (variance / len(draws)).sqrt()).max())


@kinds
@pytest.mark.statistics
def test_samples_have_the_covariance(kind: str) -> None:
    limit = 4.5  # standard errors, the largest of 256 dependent elements
    assert moment_error(kind) < limit
    assert moment_error(kind, wrong=1.05) > limit  # the broken twin: 5 % too wide


@kinds
@pytest.mark.parametrize("components", [1, 3])
def test_posterior_with_any_covariance_comes_back_bit_for_bit(kind: str, components: int, tmp_path: Path) -> None:
    gaussian = Gaussian(numbers(components, LAYOUT.dim), tuple(make(kind, seed)[0] for seed in range(components)))
    parameters = [[name, list(shape)] for name, shape in LAYOUT.named_shapes.items()]
    config = posteriors.config(approximation=gaussian.kind, num_members=0, parameters=parameters)
    posterior = Posterior(gaussian, config)
    posterior.save_pretrained(tmp_path)
    loaded = Posterior.from_pretrained(tmp_path)
    assert posteriors.equal(loaded, posterior)
    # the file holds bases in another memory order, so matrix products may round differently
    assert torch.allclose(loaded.sample(4, generator(1)), posterior.sample(4, generator(1)), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"approximation must be one of draws, gaussian, .*got \"gaussian_wishart\""):
        dataclasses.replace(config, approximation="gaussian_wishart")


@kinds
def test_a_wrong_shape_in_the_file_is_refused_by_its_own_name(kind: str, tmp_path: Path) -> None:
    gaussian = Gaussian(numbers(2, LAYOUT.dim), tuple(make(kind, seed)[0] for seed in (0, 1)))
    parameters = [[name, list(shape)] for name, shape in LAYOUT.named_shapes.items()]
    config = posteriors.config(approximation=gaussian.kind, num_members=0, parameters=parameters)
    Posterior(gaussian, config).save_pretrained(tmp_path)
    path = tmp_path / "covariance.safetensors"
    kept = {name: value.clone() for name, value in load_file(path).items()}  # the file changes later
    for name, value in kept.items():
        wrongs = [value[:1], value[0], torch.cat([value, value], -1)] + ([value.mT] if value.ndim > 2 else [])
        for wrong in wrongs:
            if wrong.shape == value.shape:  # a square basis is transposed; the empty tensor of an identity, twice
                continue
            expected, got = (re.escape(str(list(shape))) for shape in (value.shape, wrong.shape))
            edit_tensors(path, lambda tensors, name=name, wrong=wrong: tensors.update({name: wrong}))
            sign(tmp_path)
            with pytest.raises(
                ValueError, match=rf"covariance\.safetensors: {name}: expected shape {expected}, got {got}"
            ):
                Posterior.from_pretrained(tmp_path)
            edit_tensors(path, lambda tensors: tensors.update(kept))
    sign(tmp_path)
    assert Posterior.from_pretrained(tmp_path).approximation.kind == gaussian.kind


@kinds
def test_a_covariance_file_that_lies_is_refused(kind: str) -> None:
    tensors = make(kind)[0].tensors(LAYOUT)
    structure = COVARIANCES[kind]
    with pytest.raises(ValueError, match=r"unknown tensors \['extra'\]"):
        structure.from_tensors({**tensors, "extra": torch.zeros(1)}, LAYOUT)
    for name, value in tensors.items():
        changed = {**tensors, name: 2 * value}
        with pytest.raises(ValueError, match="missing tensors"):
            structure.from_tensors({k: v for k, v in tensors.items() if k != name}, LAYOUT)
        if not value.numel():  # the identity
            continue
        if name.startswith(("left", "right", "basis")):
            with pytest.raises(ValueError, match="no orthonormal columns"):
                structure.from_tensors(changed, LAYOUT)
        with pytest.raises(ValueError):
            structure.from_tensors({**tensors, name: value[:1]}, LAYOUT)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: Diagonal(torch.tensor([1.0, -1.0])), "1 of 2 not positive"),
        (lambda: Diagonal(torch.tensor([1.0, torch.nan])), "1 of 2 not positive"),
        (lambda: KroneckerBlock(torch.eye(3), None, torch.ones(2, 2)), r"left must be \[2, 2\]"),
        (lambda: LowRank(torch.ones(3), torch.eye(3), torch.zeros(3)), "r positive scales"),
        (lambda: Full(torch.ones(2, 2)), "lower triangular"),
        (lambda: Gaussian(torch.zeros(2, 3), (Diagonal(torch.ones(3)),)), "K covariances"),
    ],
)
def test_what_is_no_covariance_is_refused(make_one: object, message: str) -> None:
    assert callable(make_one)
    with pytest.raises(ValueError, match=message):
        make_one()
