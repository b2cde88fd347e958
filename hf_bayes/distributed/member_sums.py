"""Where the members of a prediction are: all here, or spread over processes, which then exchange sums only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_bayes.uncertainty.decomposition import Partial, Prediction, finish, partial, predict


class LocalMembers:
    """All members are in this process.

    Attributes:
        rank: which of the shares this process holds.
    """

    rank = 0

    def predict(self, logits: Tensor) -> Prediction:
        """[M, n, C] logits -> the mixture and its uncertainties."""
        return predict(logits)

    def mean(self, values: Tensor) -> Tensor:
        """[M, ...] -> [...]: the mean over all members."""
        return values.mean(0)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """[M, ...] -> [...]: log of the mean over all members of exp(values)."""
        return values.logsumexp(0) - math.log(len(values))

    def every(self, values: Tensor) -> Tensor:
        """[m, ...] of the members here -> [M, ...] of all."""
        return values

    def agree_on_randomness(self) -> None:
        """To be called before tokens are drawn: processes that drew other tokens would speak of other texts."""


class SpreadMembers(LocalMembers):
    """Every process of ``group`` holds as many members and is asked the same: probabilities and entropies are summed.

    A prediction moves C + 1 numbers a row, whatever M is.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def predict(self, logits: Tensor) -> Prediction:
        mine = partial(logits)
        return finish(Partial(mine.num_members * self.size, self._sum(mine.probs), self._sum(mine.entropies)))

    def mean(self, values: Tensor) -> Tensor:
        return self._sum(values.sum(0)) / (len(values) * self.size)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        peak = values.amax(0)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        peak = torch.where(peak.isfinite(), peak, 0.0)
        return self._sum((values - peak).exp().sum(0)).log() + peak - math.log(len(values) * self.size)

    def every(self, values: Tensor) -> Tensor:
        pieces = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(pieces, values.contiguous(), group=self.group)
        return torch.cat(pieces)

    def agree_on_randomness(self) -> None:
        mine = (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
        states: list[Any] = [None] * self.size
        dist.all_gather_object(states, mine, group=self.group)
        torch.set_rng_state(states[0][0])
        if states[0][1] is not None:
            torch.cuda.set_rng_state(states[0][1])

    def _sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor
