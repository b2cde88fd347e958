"""The variance that the choice of an update's rows gives to its gradient.

Between the micro-batches of an update the variance costs nothing more (``BetweenBatches``). Where an update has one
micro-batch, it is estimated from two halves of its rows (``between_halves``), which costs half a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.models.base import BayesianModel


class GradientPasses(Protocol):
    """The passes of a ``ModelObjective``."""

    model: BayesianModel
    shared: bool
    chains: range

    def member_chunks(self, batch: dict[str, Any]) -> list[slice]: ...

    def passes(
        self,
        theta: Tensor,
        batch: Any,
        *,
        gradient: bool,
        step: int,
        micro: int,
        chunks: list[slice] | None = None,
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]: ...


class BetweenBatches:
    """The variance of a sum of k gradients g_i: k / (k - 1) sum_i (g_i - mean g)^2, a mean over each tensor.

    It is as if rows were drawn with replacement: 1 / (1 - share of the data in an update) too large within an epoch.
    """

    def __init__(self, theta: Tensor, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._squares = theta.new_zeros(len(theta), len(sizes))
        self._count = theta.new_zeros(len(theta))

    def add(self, members: slice, grad: Tensor) -> None:
        """Add the gradient [m, d] of a micro-batch."""
        self._squares[members] += per_tensor_mean(grad.square(), self._sizes)
        self._count[members] += 1

    def of_sum(self, grad: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the variance [M, S] of the sum ``grad`` [M, d]; None where there are fewer than two micro-batches.

        Args:
            total: sums a tensor, in place, over processes that hold other micro-batches.
        """
        squares, count = total(self._squares), total(self._count)[:, None]
        if bool((count < 2).any()):  # the rest at the end of a stream
            return None
        of_sum = per_tensor_mean(grad.square(), self._sizes)
        return (count / (count - 1) * (squares - of_sum / count)).clamp_min(0)


def between_halves(
    objective: GradientPasses, theta: Tensor, batch: dict[str, Any], grad: Tensor, *, step: int
) -> Tensor | None:
    """Return the variance [M, S] of a micro-batch's gradient, from the two halves of its rows.

    Gradients are sums over rows. With b and c of them in the halves, g / b - g' / c has 1 / b + 1 / c times the
    variance of a row's, and the sum over all b + c rows has b + c times that: V = b c E (g / b - g' / c)^2.

    One half is passed, and the other is what is left of the whole. Dropout masks differ between passes: with dropout
    both halves are passed, and the masks are part of the noise.

    Args:
        theta: [M, d].
        batch: prepared.
        grad: [M, d] of minus the log-likelihood of the whole.
        step: number of the update, for dropout masks.
    Returns:
        None where a chain has a single row.
    """
    groups = 1 if objective.shared else len(objective.chains)
    rows = num_rows_of(batch) // groups
    b, c = rows // 2, rows - rows // 2
    if b == 0:
        return None
    first = torch.arange(rows).repeat(groups) < b
    halves = [objective.model.take_rows(batch, part.nonzero()[:, 0]) for part in (first, ~first)]
    dropout = objective.model.training and objective.model.members.trunk.has_dropout
    variance = grad.new_zeros(len(grad), len(objective.model.layout.sizes))
    chunks = objective.member_chunks(batch)  # of the whole: more members of half the rows would need more memory

    def passes(number: int) -> Any:
        return objective.passes(theta, halves[number], gradient=True, step=step, micro=number, chunks=chunks)

    devices = [theta.device] if theta.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        others = list(passes(1)) if dropout else None
    with torch.random.fork_rng(devices=devices):
        for index, (members, _, one) in enumerate(passes(0)):
            if others is None:  # g / b - (whole - g) / c
                difference = one.mul_(1 / b + 1 / c).sub_(grad[members], alpha=1 / c)
            else:
                difference = one.div_(b).sub_(others[index].grad, alpha=1 / c)
            variance[members] = b * c * per_tensor_mean(difference.square_(), objective.model.layout.sizes)
    return variance
