"""Chains over the processes of one accelerate world: a (chain, data) mesh, and what crosses between its processes.

Of processes W and chains K one divides the other. With W <= K every process owns K / W chains; otherwise groups of
W / K processes share a chain, see different rows of its minibatches and add up its gradient. Chains never talk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


class ChainMesh:
    """This process's place in the mesh, data the inner dimension.

    Args:
        together: whether all chains live on all processes, which share every one of them.
    Attributes:
        device: of this process.
        num_processes: W.
        rank: of this process among them.
        chains: global indices of the chains that live here.
        chain_size, chain_rank: parts that the chains are dealt into, and which one this is.
        data_size, data_rank: processes that share these chains, and which one this is.
    Raises:
        ValueError: if neither of processes and chains divides the other.
    """

    def __init__(self, num_chains: int, device: torch.device, *, together: bool = False) -> None:
        self.device = device
        launched = dist.is_available() and dist.is_initialized()
        self.num_processes, self.rank = (dist.get_world_size(), dist.get_rank()) if launched else (1, 0)
        self.chain_size = 1 if together else min(self.num_processes, num_chains)
        if num_chains % self.chain_size or self.num_processes % self.chain_size:
            raise ValueError(
                f"{num_chains} chains on {self.num_processes} processes: one must divide the other. Set num_chains in "
                "the method, or launch another number of processes"
            )
        self.data_size = self.num_processes // self.chain_size
        self.chain_rank, self.data_rank = divmod(self.rank, self.data_size)
        count = num_chains // self.chain_size
        self.chains = range(self.chain_rank * count, (self.chain_rank + 1) * count)
        self.chain_group: Any = None
        self._data_group: Any = None
        if self.num_processes > 1:
            shape = (self.chain_size, self.data_size)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("chain", "data"))
            self.chain_group, self._data_group = mesh.get_group("chain"), mesh.get_group("data")

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The sum, in place, over the processes that share these chains: the same bits on each of them."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self._data_group)
        return tensor

    def gather_chains(self, tensor: Tensor) -> Tensor:
        """[m, ...] of the chains here -> [K, ...] of all, in their order."""
        if self.chain_size == 1:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(self.chain_size)]
        dist.all_gather(pieces, tensor.contiguous(), group=self.chain_group)
        return torch.cat(pieces)

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's values."""
        if self.num_processes == 1:
            return tensor
        values = tensor.to(self.device, copy=True)  # NCCL moves what is on its device
        dist.broadcast(values, src=0)
        return values.to(tensor.device)

    def exchange(self, value: Any) -> list[Any]:
        """Small values of the processes with the same rows and other chains, in the order of the chains."""
        return _all_gather(value, self.chain_size, self.chain_group)

    def share(self, value: Any) -> list[Any]:
        """Small values of all processes, in the order of their ranks."""
        return _all_gather(value, self.num_processes, None)


def _all_gather(value: Any, size: int, group: Any) -> list[Any]:
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
