"""The mesh of one accelerate world: chains and rows of data are divided over its processes.

The mesh has the dimensions (chain, data). Of W processes and K chains, one number divides the other. With W <= K every
process owns K / W chains. Otherwise groups of W / K processes share a chain: each process computes the gradient on
different rows of the minibatch, and the gradients are summed. Different chains exchange nothing while they are sampled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


class ChainMesh:
    """The position of this process in the mesh. Data is the inner dimension.

    Args:
        num_chains: K.
        device: the device of this process.
        together: True if every process holds all chains, so that all processes share each of them.
    Attributes:
        device: the device of this process.
        num_processes: W.
        rank: the rank of this process among all processes.
        chains: global indices of the chains of this process.
        chain_size, chain_rank: size of the chain dimension, and the coordinate of this process in it.
        data_size, data_rank: size of the data dimension, and the coordinate of this process in it.
    Raises:
        ValueError: if neither number of processes and chains divides the other.
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
        """Sum a tensor, in place, over the processes that share these chains. The result is bitwise equal on each."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self._data_group)
        return tensor

    def gather_chains(self, tensor: Tensor) -> Tensor:
        """Gather the values of all chains in their order: [m, ...] for the chains of this process -> [K, ...]."""
        if self.chain_size == 1:
            return tensor
        values = tensor.to(self.device).contiguous()  # NCCL needs tensors on the device, and draws are on the CPU
        pieces = [torch.empty_like(values) for _ in range(self.chain_size)]
        dist.all_gather(pieces, values, group=self.chain_group)
        return torch.cat(pieces).to(tensor.device)

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return the values of the first process (rank 0)."""
        if self.num_processes == 1:
            return tensor
        values = tensor.to(self.device, copy=True)  # NCCL needs tensors on the device
        dist.broadcast(values, src=0)
        return values.to(tensor.device)

    def exchange(self, value: Any) -> list[Any]:
        """Gather a small value over the chain dimension: from processes with the same rows and different chains.

        The values are in the order of the chains.
        """
        return _all_gather(value, self.chain_size, self.chain_group)

    def share(self, value: Any) -> list[Any]:
        """Gather a small value from all processes, in the order of their ranks."""
        return _all_gather(value, self.num_processes, None)


def _all_gather(value: Any, size: int, group: Any) -> list[Any]:
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
