"""Minibatches for ``hf_bayes.sample``: each chain reads the rows in an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def passes(num_rows: int, num_chains: int, size: int, rng: torch.Generator) -> Callable[[], Iterator[Tensor]]:
    """Return a function that begins a pass over the data: numbers of rows [num_chains, size], without the last few."""

    def one_pass() -> Iterator[Tensor]:
        order = torch.stack([torch.randperm(num_rows, generator=rng) for _ in range(num_chains)])
        return iter(order[:, : num_rows // size * size].split(size, 1))

    return one_pass
