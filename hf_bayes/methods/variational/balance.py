"""The scales of LoRA's two factors, chosen in closed form.

    A = c A',  B = B' / c,  so that B A = B' A',   with a c > 0 for each row of A and its column of B

The likelihood does not depend on c. For a prior N(0, std^2), three terms of the free energy do:

    F = w (c^2 P + Q / c^2) / 2 - n T log c + ...,   c^2 = (n T + sqrt((n T)^2 + 4 w^2 P Q)) / (2 w P) at its minimum

P is the sum of E_q[A'^2] / std^2 over the row, Q the same for the column, w the weight of the prior, and n the number
of random elements of the row less the number of random elements of the column. An optimiser works on A' and B', and c
is always at this minimum, where the gradient of F in A' and B' is the gradient at a constant c. So the optimum is the
optimum of F, and the optimiser need not follow the valley (c A', B' / c). F is almost flat there: with a wide prior,
the way along the valley takes far more updates than everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.types import Prior, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.variational.lora_coordinates import factor_pairs


@dataclass(frozen=True)
class ScaledPrior:
    """The density of a prior at ``scale`` * theta, for theta in the coordinates A' and B'."""

    prior: Prior
    scale: Tensor

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.prior.log_prob(self.scale * theta)

    def grad(self, theta: Tensor) -> Tensor:
        return self.scale * self.prior.grad(self.scale * theta)

    def to(self, like: Tensor) -> ScaledPrior:
        return ScaledPrior(self.prior.to(like), self.scale.to(like))


class FactorPair(NamedTuple):
    """The two factors of a layer.

    Attributes:
        a, b: the columns of theta that hold them.
        shape_a, shape_b: [r, ...] and [out, r, ...].
        surplus: n, not 0. If it is positive, A has random elements, and so P > 0; likewise B and Q if it is negative.
    """

    a: slice
    b: slice
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    surplus: int

    def rows(self, values: Tensor) -> Tensor:
        """Return the elements of A among values [M, d], as a view [M, r, -1]."""
        found: Tensor = values[:, self.a].unflatten(1, (self.shape_a[0], -1))
        return found

    def columns(self, values: Tensor) -> Tensor:
        """Return the elements of B among values [M, d], as a view [M, r, out, -1]."""
        found: Tensor = values[:, self.b].unflatten(1, (*self.shape_b[:2], -1))
        return found.transpose(1, 2)


class Balance(NamedTuple):
    """The pairs of factors, and the terms of F that depend on their scales.

    Attributes:
        pairs: one for each layer.
        is_random: [d] 1 for random elements, 0 for points.
        std: [d] or [], of the prior.
        prior_weight: w.
        temperature: T.
    """

    pairs: tuple[FactorPair, ...]
    is_random: Tensor
    std: Tensor
    prior_weight: float
    temperature: float

    def log_scales(self, mean: Tensor, variance: Tensor) -> list[Tensor]:
        """Return log c [M, r] of each pair at the minimum of F, for mean and variance [M, d] of A' and B'."""
        squares = self.prior_weight * (mean.square() + self.is_random * variance) / self.std.square()
        found = []
        for pair in self.pairs:
            of_row, of_column = (part(squares).flatten(2).sum(2) for part in (pair.rows, pair.columns))
            surplus = self.temperature * pair.surplus
            root = (surplus**2 + 4 * of_row * of_column).sqrt()
            # for n < 0 the numerator is a small difference: this is the same number without it
            square = (surplus + root) / (2 * of_row) if surplus > 0 else 2 * of_column / (root - surplus)
            found.append(0.5 * square.log())
        return found

    def scale(self, log_scales: list[Tensor], like: Tensor) -> Tensor:
        """Return the factors [M, d] by which A', B' are multiplied to get A, B."""
        found = torch.ones_like(like)
        for pair, log_scale in zip(self.pairs, log_scales, strict=True):
            pair.rows(found).mul_(log_scale.exp()[:, :, None])
            pair.columns(found).mul_(log_scale.neg().exp()[:, :, None, None])
        return found

    def entropy_gain(self, log_scales: list[Tensor]) -> Tensor:
        """Return the entropy [M] of A and B less the entropy of A' and B', the sum of n log c."""
        parts = [pair.surplus * part.sum(1) for pair, part in zip(self.pairs, log_scales, strict=True)]
        return torch.stack(parts).sum(0)


def balance_of(problem: Problem, is_random: Tensor, *, prior_weight: float, temperature: float) -> Balance | None:
    """Return the scales to choose; None if there are no pairs, or their prior is not a Gaussian around 0.

    A pair with n = 0 is left as it is: if both factors are points and B is 0, as in a new LoRA, c would be 0.

    Args:
        is_random: [d] bool.
    """
    named, prior = factor_pairs(problem.shapes), problem.prior
    if not named or not isinstance(prior, GaussianPrior):
        return None
    sizes = [torch.Size(shape).numel() for shape in problem.shapes.values()]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    columns = {name: slice(end - size, end) for name, end, size in zip(problem.shapes, ends, sizes, strict=True)}
    means = prior.mean.expand(ends[-1])
    if any(bool(means[columns[name]].any()) for pair in named.values() for name in pair):
        return None

    def random_elements(name: str, rank: int) -> int:
        return int(is_random[columns[name]].sum()) // rank

    pairs = []
    for a, b in named.values():
        rank = problem.shapes[a][0]
        surplus = random_elements(a, rank) - random_elements(b, rank)
        if surplus:
            pairs.append(FactorPair(columns[a], columns[b], problem.shapes[a], problem.shapes[b], surplus))
    if not pairs:
        return None
    return Balance(tuple(pairs), is_random.to(prior.std), prior.std, prior_weight, temperature)
