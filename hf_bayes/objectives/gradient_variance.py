"""The variance that the choice of an update's rows gives to its gradient.

Between the micro-batches of an update the variance costs nothing more (``BetweenBatches``). Where an update has one
micro-batch, it is estimated from two parts of its rows (``between_parts``), which costs a quarter of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.passes import MemberPass


class BetweenBatches:
    """The variance of a sum of k gradients g_i: k / (k - 1) sum_i (g_i - mean g)^2, a mean over each tensor.

    The estimate is right for rows that are drawn with replacement. Within an epoch it is too large, by the factor
    1 / (1 - share of the data in an update).
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
        """Return the variance [M, S] of the sum ``grad`` [M, d]; None if there are fewer than two micro-batches.

        Args:
            total: a function that sums a tensor, in place, over the processes with other micro-batches.
        """
        squares, count = total(self._squares), total(self._count)[:, None]
        if bool((count < 2).any()):  # the rest at the end of a stream
            return None
        of_sum = per_tensor_mean(grad.square(), self._sizes)
        return (count / (count - 1) * (squares - of_sum / count)).clamp_min(0)


def between_parts(
    model: BayesianModel,
    batch: dict[str, Any],
    grad: Tensor,
    passes: Callable[[dict[str, Any], int], Iterable[MemberPass]],
    *,
    num_groups: int,
) -> Tensor | None:
    """Return the variance [M, S] of a micro-batch's gradient, from a quarter of its rows and the others.

    Gradients are sums over rows. Let g and g' be the gradients of the parts, b and c their numbers of rows, and v the
    variance of the gradient of one row. Then g / b - g' / c has the variance v (1 / b + 1 / c), and the sum over all
    rows has the variance V = v (b + c). So V = b c E (g / b - g' / c)^2, for parts of any size.

    Only the smaller part is passed through the model: the gradient of the other is the rest of the whole. With dropout
    the masks of passes differ, so both parts are passed, and the masks are part of the noise. Batch normalisation takes
    the statistics of the rows that it sees, so there the parts are halves.

    Args:
        model: the model that is sampled.
        batch: a prepared batch.
        grad: [M, d] the gradient of minus the log-likelihood of the whole batch.
        passes: (a part, its number) -> what ``MemberPasses.of_batch`` yields.
        num_groups: the number of groups of rows in the batch: 1 if chains share rows, else the number of chains.
    Returns:
        [M, S]; None if a chain has a single row.
    """
    rows = num_rows_of(batch) // num_groups
    if rows < 2:
        return None
    b = rows // 2 if model.members.batch_norms else max(1, rows // 4)
    c = rows - b
    first = torch.arange(rows).repeat(num_groups) < b
    parts = [model.take_rows(batch, part.nonzero()[:, 0]) for part in (first, ~first)]
    variance = grad.new_zeros(len(grad), len(model.layout.sizes))
    devices = [grad.device] if grad.device.type == "cuda" else []
    others = None
    if model.training and model.members.trunk.has_dropout:
        with torch.random.fork_rng(devices=devices):
            others = [other for _, _, other, _ in passes(parts[1], 1)]
    with torch.random.fork_rng(devices=devices):
        for index, (members, _, one, _) in enumerate(passes(parts[0], 0)):
            assert one is not None
            if others is None:  # g / b - (whole - g) / c
                difference = one.mul_(1 / b + 1 / c).sub_(grad[members], alpha=1 / c)
            else:
                other = others[index]
                assert other is not None
                difference = one.div_(b).sub_(other, alpha=1 / c)
            variance[members] = b * c * per_tensor_mean(difference.square_(), model.layout.sizes)
    return variance
