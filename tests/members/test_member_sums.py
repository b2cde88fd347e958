from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_bayes.members.member_sums import DistributedMembers, LocalMembers
from hf_bayes.uncertainty.decomposition import predict

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Ranks:
    """Two processes as two threads: a substitute for the collectives of ``torch.distributed``."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.rank = threading.local()
        self.values: list[Any] = [None, None]

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


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    for name in ("all_reduce", "all_gather", "all_gather_object"):
        monkeypatch.setattr(dist, name, getattr(made, name))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: made.rank.number)
    return made


def test_local_sums_are_those_of_the_members() -> None:
    local, values = LocalMembers(), torch.tensor([[1.0], [3.0]]).log()
    torch.testing.assert_close(local.mean(values), values.mean(0))
    torch.testing.assert_close(local.log_mean_exp(values), torch.tensor([math.log(2.0)]))
    assert local.every(values) is values
    assert torch.equal(local.predict(LOGITS).log_probs, predict(LOGITS).log_probs)


@pytest.mark.parametrize("name", ["mean", "log_mean_exp", "every"])
def test_spread_sums_equal_those_of_one_process(ranks: Ranks, name: str) -> None:
    expected = getattr(LocalMembers(), name)(LOGITS)
    for found in ranks.run(lambda members, rank: getattr(members, name)(LOGITS[2 * rank : 2 * rank + 2])):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_spread_predictions_equal_those_of_one_process(ranks: Ranks) -> None:
    expected = predict(LOGITS)
    for found in ranks.run(lambda members, rank: members.predict(LOGITS[2 * rank : 2 * rank + 2])):
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.uncertainty.total, expected.uncertainty.total, rtol=1e-10, atol=0)
        torch.testing.assert_close(found.uncertainty.epistemic, expected.uncertainty.epistemic, rtol=1e-6, atol=1e-12)


def test_impossible_values_of_all_members_stay_impossible(ranks: Ranks) -> None:
    values = torch.tensor([[-math.inf, 0.0]]).double()
    for found in ranks.run(lambda members, rank: members.log_mean_exp(values)):
        assert found.tolist() == [-math.inf, 0.0]
