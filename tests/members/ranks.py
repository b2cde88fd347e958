"""Members on two processes, which are threads of the test."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_bayes.members.member_sums import DistributedMembers


class Ranks:
    """Two processes as two threads: a substitute for the collectives of ``torch.distributed``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier = threading.Barrier(2)
        self.rank = threading.local()
        self.values: list[Any] = [None, None]
        for name in ("all_reduce", "all_gather", "all_gather_object"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "get_rank", lambda group: self.rank.number)

    def exchanged(self, value: Any) -> list[Any]:
        self.values[self.rank.number] = value
        self.barrier.wait(60)
        values = list(self.values)
        self.barrier.wait(60)
        return values

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        both = torch.stack(self.exchanged(tensor.clone()))
        tensor.copy_(both.amax(0) if op == dist.ReduceOp.MAX else both.sum(0))

    def all_gather(self, pieces: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        for piece, value in zip(pieces, self.exchanged(tensor.clone()), strict=True):
            piece.copy_(value)

    def all_gather_object(self, values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = self.exchanged(value)

    def run(self, work: Any) -> list[Any]:
        """Return what ``work(members, rank)`` returns in each process."""
        found: list[Any] = [None, None]

        def process(number: int) -> None:
            self.rank.number = number
            found[number] = work(DistributedMembers(None), number)

        threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found
