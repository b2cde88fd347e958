from __future__ import annotations

import pytest
import torch

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES, Kronecker, KroneckerBlock, dense
from tests.distributions.covariance.structures import LAYOUT, basis, make, numbers


def test_an_eigenbasis_of_what_is_no_matrix_is_refused() -> None:
    layout = Layout(("a",), ((2, 3, 4),))
    tensors = {"variances.a": torch.ones(2, 3, 4), "left.a": torch.eye(2), "right.a": torch.eye(3)}
    with pytest.raises(ValueError, match=r"variances\.a: a is no matrix \[2, 3, 4\].* expected stds\.a"):
        COVARIANCES["kronecker"].from_tensors(tensors, layout)


def test_a_vector_may_have_a_dense_block_also_in_a_file() -> None:
    blocks = list(make("kronecker")[0].blocks)  # type: ignore[attr-defined]
    variances = numbers(4, 1).exp()
    blocks[1] = KroneckerBlock(basis(4), None, variances)
    covariance = Kronecker(tuple(blocks))
    own = dense(covariance, variances)[6:10, 6:10]
    assert torch.allclose(own, basis(4) @ torch.diag(variances[:, 0]) @ basis(4).mT)
    tensors = covariance.tensors(LAYOUT)
    assert tensors["variances.b"].shape == (4,)
    again = COVARIANCES["kronecker"].from_tensors(tensors, LAYOUT)
    assert torch.equal(dense(again, variances), dense(covariance, variances))
    with pytest.raises(ValueError, match=r"left\.b: expected shape \[4, 4\], got \[3, 3\]"):
        COVARIANCES["kronecker"].from_tensors(tensors | {"left.b": torch.eye(3)}, LAYOUT)


def test_draws_do_not_depend_on_the_choice_of_eigenvectors() -> None:
    variances = numbers(3, 4).exp()
    variances[:, 1:3] = variances[:, 1:2]  # these two directions of the right side have one eigenspace
    angle = torch.tensor(0.7, dtype=torch.float64)
    turned = basis(4).clone()
    turned[:, 1:3] @= torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    one, other = KroneckerBlock(basis(3), basis(4), variances), KroneckerBlock(basis(3) * signs, turned, variances)
    noise = numbers(5, 12, seed=1)
    # 1e-12: a few products of matrices of size 4 in float64
    assert (one.root(noise) - other.root(noise)).abs().max() < 1e-12
    assert (one.root(noise) - (one.variances.sqrt() * noise.view(5, 3, 4)).flatten(1)).abs().max() > 0.1
