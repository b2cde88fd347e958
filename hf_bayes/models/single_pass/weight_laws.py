"""The Gaussian of one weight matrix and its bias, and the moments of its product with a Gaussian input.

The paper is "Posterior inferred, now what? Streamlining prediction in Bayesian deep learning". For h = W a + b with W
and a independent, eqs. 1 and 2 (derived as eqs. 5 to 25) are

    E h = E W E a + E b,
    Cov[h_k, h_l] = sum_ij (E a_i E a_j + Cov[a_i, a_j]) Cov[W_ki, W_lj] + sum_ij E W_ki E W_lj Cov[a_i, a_j]
                    + bias terms.

The first sum needs the second moment of a; it is the noise that the layer adds, and ``WeightLaw`` computes it. The
second sum transports the noise of the input. The printed eq. 28 has Cov[W] in a factor that must hold E a E a' alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import (
    Covariance,
    Diagonal,
    DiagonalBlock,
    Full,
    Kronecker,
    KroneckerBlock,
    LowRank,
    moved,
)


@dataclass(frozen=True, eq=False)
class WeightLaw:
    """W ~ N(mean, V) and b ~ N(bias, V_b), where V is diagonal in a Kronecker basis, plus a few directions.

    V = (left (x) right) diag(values) (left (x) right)' + sum_r scales_r columns_r columns_r'. The directions are shared
    by W and b, so they hold Cov[W, b].

    Attributes:
        mean: [out, in].
        bias: [out]; None without a bias.
        values: [out, in], at least 0.
        left: [out, out] with orthonormal columns; None is the identity.
        right: [in, in], in the same way.
        bias_values: [out] variances of a random bias, without the directions; None if the bias is frozen.
        columns: [r, out, in + 1], the last entry for the bias; None if there are no directions.
        scales: [r], of either sign.
        correlated: True if the noise of W or b may be correlated with the noise of other layers.
    """

    mean: Tensor
    bias: Tensor | None
    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    bias_values: Tensor | None = None
    columns: Tensor | None = None
    scales: Tensor | None = None
    correlated: bool = False

    def variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Return [..., out], the variance that W and b add to W a + b (eq. 38 if V is diagonal).

        Args:
            mean: [..., in] E a.
            variance: [..., in] variances of a, whose elements are independent, or [..., in, in] its covariance; None
                means 0.
        """
        rotated = self._rotated_moment(mean, variance) @ self.values.mT
        found = rotated if self.left is None else rotated @ self.left.square().mT
        found = found if self.bias_values is None else found + self.bias_values
        if self.columns is None or self.scales is None:
            return found
        weights = self.columns[..., :-1]
        spread = torch.einsum("rki,...i->...rk", weights, mean) + self.columns[..., -1]
        found = found + torch.einsum("r,...rk->...k", self.scales, spread.square())
        if variance is not None and variance.ndim == mean.ndim:
            found = found + variance @ torch.einsum("r,rki->ik", self.scales, weights.square())
        elif variance is not None:
            found = found + torch.einsum("r,rki,...ij,rkj->...k", self.scales, weights, variance, weights)
        return found.clamp_min(0)  # scales of shrunk directions are negative, and rounding may leave less than 0

    def covariance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Return [..., out, out], the covariance between outputs; its diagonal is ``variance``."""
        rotated = self._rotated_moment(mean, variance) @ self.values.mT
        found = torch.diag_embed(rotated)
        if self.left is not None:
            found = (self.left * rotated[..., None, :]) @ self.left.mT
        if self.bias_values is not None:
            found = found + torch.diag(self.bias_values)
        if self.columns is None or self.scales is None:
            return found
        weights = self.columns[..., :-1]
        spread = torch.einsum("rki,...i->...rk", weights, mean) + self.columns[..., -1]
        found = found + torch.einsum("r,...rk,...rl->...kl", self.scales, spread, spread)
        if variance is not None:
            found = found + torch.einsum("r,rki,...i,rli->...kl", self.scales, weights, variance, weights)
        return found

    def times(self, mean: Tensor, variance: Tensor | None, vectors: Tensor) -> Tensor:
        """Return [..., out], ``covariance`` times ``vectors`` [..., out], without forming it.

        Args:
            mean: [..., in] E a.
            variance: [..., in] variances of a; None means 0.
            vectors: [..., out].
        """
        rotated = self._rotated_moment(mean, variance) @ self.values.mT
        found = rotated * vectors if self.left is None else (rotated * (vectors @ self.left)) @ self.left.mT
        found = found if self.bias_values is None else found + self.bias_values * vectors
        if self.columns is None or self.scales is None:
            return found
        weights = self.columns[..., :-1]
        spread = torch.einsum("rki,...i->...rk", weights, mean) + self.columns[..., -1]
        along = self.scales * (spread @ vectors[..., None])[..., 0]
        found = found + (along[..., None, :] @ spread)[..., 0, :]
        if variance is not None:
            shared = torch.einsum("rki,...k->...ri", weights, vectors) * variance[..., None, :]
            found = found + torch.einsum("r,rki,...ri->...k", self.scales, weights, shared)
        return found

    def without_bias(self) -> WeightLaw:
        """Return the law of W alone, which multiplies the noise of a."""
        columns = None if self.columns is None else F.pad(self.columns[..., :-1], (0, 1))
        return replace(self, bias=None, bias_values=None, columns=columns)

    def joint(self, inputs: Tensor) -> Tensor:
        """Return [B, n, n], the covariance that W and b add between all outputs of all tokens, n = T * out.

        The tokens share W (eq. 31), so their outputs are correlated.

        Args:
            inputs: [q, B, T, in], the mean of a and the columns of a root of its covariance between tokens and units.
        """
        rotated = inputs if self.right is None else inputs @ self.right
        gram = torch.einsum("qbti,ki,qbsi->bkts", rotated, self.values, rotated)
        left = torch.eye(len(self.values)).to(gram) if self.left is None else self.left
        found = torch.einsum("ka,bats,la->btksl", left, gram, left)
        if self.bias_values is not None:
            found = found + torch.diag(self.bias_values)[:, None, :]
        if self.columns is not None and self.scales is not None:
            spread = torch.einsum("rki,qbti->rqbtk", self.columns[..., :-1], inputs)
            spread[:, 0] += self.columns[:, None, None, :, -1]  # the bias multiplies the constant 1, which is no noise
            found = found + torch.einsum("r,rqbtk,rqbsl->btksl", self.scales, spread, spread)
        size = found.shape[1] * found.shape[2]
        return found.reshape(len(found), size, size)

    def token_features(self, mean: Tensor) -> Tensor:
        """Return [..., in] features z of tokens: z_t . z_s is the covariance of their noise, averaged over outputs."""
        rotated = mean if self.right is None else mean @ self.right
        return rotated * self.values.mean(0).sqrt()

    def _rotated_moment(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Return [..., in], the second moments of a in the basis ``right``."""
        moment = mean.square() if self.right is None else (mean @ self.right).square()
        if variance is None:
            return moment
        if variance.ndim > mean.ndim:
            rotated = variance if self.right is None else self.right.mT @ variance @ self.right
            return moment + rotated.diagonal(dim1=-2, dim2=-1)
        return moment + (variance if self.right is None else variance @ self.right.square())


@dataclass(frozen=True, eq=False)
class _Part:
    """The covariance of one tensor of theta, as ``WeightLaw`` splits it; shapes as of the tensor."""

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    columns: Tensor | None = None
    scales: Tensor | None = None
    correlated: bool = False


def parts_of(covariance: Covariance, layout: Layout) -> dict[str, _Part]:
    """Return the covariance of each tensor of ``layout``.

    The covariance between tensors of two modules is dropped, and ``correlated`` marks the tensors that may have one.

    Raises:
        ValueError: for a structure without a rule.
    """
    match covariance:
        case Diagonal():
            return {name: _Part(std.square()) for name, std in layout.unflatten(covariance.std).items()}
        case Kronecker():
            return {
                name: _part_of_vector(block)
                if block.left is not None and len(shape) == 1
                else _Part(block.eigenvalues.view(shape), block.left, block.right)
                for name, shape, block in zip(layout.names, layout.shapes, covariance.blocks, strict=True)
            }
        case LowRank():
            columns = layout.unflatten((covariance.std[:, None] * covariance.basis).mT)
            stds = layout.unflatten(covariance.std)
            added = covariance.scale - 1
            mixed = bool(added.any())
            return {n: _Part(stds[n].square(), None, None, columns[n], added, mixed) for n in layout.names}
        case Full():
            columns = layout.unflatten(covariance.root(torch.eye(covariance.dim).to(covariance.precision_cholesky)))
            ones = torch.ones(covariance.dim).to(covariance.precision_cholesky)
            return {n: _Part(torch.zeros_like(v[0]), None, None, v, ones, True) for n, v in columns.items()}
    raise ValueError(
        f"a single pass has no rule for a covariance of kind {covariance.kind!r}: it has rules for diagonal, "
        "kronecker, low_rank and full. Predict by members"
    )


def _part_of_vector(block: KroneckerBlock | DiagonalBlock) -> _Part:
    """Return the covariance of a bias with a dense block, by the columns of its root."""
    variances = block.eigenvalues.flatten()
    assert block.left is not None
    return _Part(
        torch.zeros_like(variances), columns=(block.left * variances.sqrt()).mT, scales=torch.ones_like(variances)
    )


def weight_law(mean: Tensor, bias: Tensor | None, weight: _Part | None, offset: _Part | None) -> WeightLaw:
    """Return the law of a linear layer.

    Args:
        mean: [out, in].
        weight: the covariance of the weight; None if it is frozen.
        offset: the covariance of the bias; None if it is frozen or there is none.
    """
    weight = _Part(torch.zeros_like(mean)) if weight is None else moved(weight, mean)
    offset = moved(offset, mean)  # a posterior of float32 may have a model of float64, and the reverse
    given = [part for part in (weight, offset) if part is not None and part.columns is not None]
    columns = scales = None
    if given:
        scales = given[0].scales
        count = len(given[0].columns)  # type: ignore[arg-type]
        widths = ((weight, (*mean.shape,)), (offset, (len(mean), 1)))
        pieces = [
            mean.new_zeros(count, *shape)
            if part is None or part.columns is None
            else part.columns.reshape(count, *shape)
            for part, shape in widths
        ]
        columns = torch.cat(pieces, -1)
    own = None if offset is None else offset.values
    correlated = any(part.correlated for part in given)
    return WeightLaw(mean, bias, weight.values, weight.left, weight.right, own, columns, scales, correlated)


def transposed(part: _Part | None) -> _Part | None:
    """Return the covariance of W' for a layer that stores W' [in, out] (Conv1D of GPT-2)."""
    if part is None:
        return None
    columns = None if part.columns is None else part.columns.mT
    return _Part(part.values.mT, part.right, part.left, columns, part.scales, part.correlated)
