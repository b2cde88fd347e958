"""Where the members of a prediction are: all here, or spread over processes, which then exchange sums only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_bayes.uncertainty import Partial, Prediction, finish, partial, predict


class LocalMembers:
    """All members are in this process."""

    def predict(self, logits: Tensor) -> Prediction:
        """[M, n, C] logits -> the mixture and its uncertainties."""
        return predict(logits)

    def mean(self, values: Tensor) -> Tensor:
        """[M, ...] -> [...]: the mean over all members."""
        return values.mean(0)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """[M, ...] -> [...]: log of the mean over all members of exp(values)."""
        return values.logsumexp(0) - math.log(len(values))


class SpreadMembers(LocalMembers):
    """Every process of ``group`` holds as many members and is asked the same: probabilities and entropies are summed.

    A prediction moves C + 1 numbers a row, whatever M is.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, dist.get_world_size(group)

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

    def _sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor
