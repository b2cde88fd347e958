"""Sums over the members of a prediction, in one process or across processes.

Processes exchange sums only, never the logits of single members.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_bayes.uncertainty.decomposition import Partial, Prediction, finish, partial, predict


class LocalMembers:
    """Sums over members that are all in this process.

    Attributes:
        size: the number of processes that hold members.
        rank: the rank of this process among them.
    """

    size, rank = 1, 0

    def predict(self, logits: Tensor) -> Prediction:
        """Return the mixture and its uncertainties from the logits [m, n, C] of this process's members."""
        return predict(logits)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all members, [m, ...] -> [...]."""
        return values.mean(0)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """Return the log of the mean of exp(values) over all members, [m, ...] -> [...]."""
        return values.logsumexp(0) - math.log(len(values))

    def every(self, values: Tensor) -> Tensor:
        """Gather the values of all members: [m, ...] for the members of this process -> [M, ...]."""
        return values

    def agree_on_randomness(self) -> None:
        """Give all processes the same random state. Call it before tokens are drawn, so that all draw the same text."""


class DistributedMembers(LocalMembers):
    """Sums over members that are distributed over the processes of ``group``.

    Every process holds the same number of members and receives the same inputs. Probabilities and entropies are summed
    across processes. A prediction communicates C + 1 numbers per row, whatever M is.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def predict(self, logits: Tensor) -> Prediction:
        local = partial(logits)
        return finish(Partial(local.num_members * self.size, self._sum(local.probs), self._sum(local.entropies)))

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
        local = (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
        states: list[Any] = [None] * self.size
        dist.all_gather_object(states, local, group=self.group)
        torch.set_rng_state(states[0][0])
        if states[0][1] is not None:
            torch.cuda.set_rng_state(states[0][1])

    def _sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor
