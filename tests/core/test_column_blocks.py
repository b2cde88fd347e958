from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core import column_blocks as blocks
from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig

DIM = 103


@pytest.mark.parametrize("size", [1, 30, 3 * DIM, 1 << 15], ids=str)
def test_blocks_of_columns_give_what_the_whole_gives(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", size)
    theta = torch.randn(3, DIM, generator=generator("theta"), dtype=torch.float64)
    moments, row = torch.stack([theta.sin(), theta.cos()], 1), torch.arange(1.0, 4.0).double()[:, None]
    widths = []

    def function(theta: Tensor, moments: Tensor) -> tuple[Tensor, ...]:
        widths.append(theta.shape[1])
        return row * theta, moments / row[:, None], theta > moments[:, 0]

    found, expected = in_blocks(function, theta, moments), function(theta, moments)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    assert sum(widths[:-1]) == DIM
    assert max(widths[:-1]) == min(DIM, max(1, size // 3))


def test_blocks_of_an_accelerator_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ACCELERATOR_ELEMENTS", 4 * 50)
    widths = []

    def function(theta: Tensor) -> tuple[Tensor, ...]:
        widths.append(theta.shape[1])
        return (theta.square(),)

    (found,) = in_blocks(function, torch.empty(4, DIM, device="meta"))
    assert found.shape == (4, DIM)
    assert widths == [50, 50, 3]


@pytest.mark.parametrize("config", [MAPConfig(), MeanFieldConfig(), AGPSConfig(max_std=0.5)], ids=lambda c: c.name)
def test_rules_do_not_depend_on_the_size_of_blocks(config: MethodConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[Tensor, ...]:
        start = torch.ones(3, DIM)
        return sample(
            lambda theta, batch: (theta.square() + theta.cos()).sum(1), start, config, num_steps=12, learning_rate=0.1
        ).state

    whole = state()
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 48)
    assert all(torch.equal(a, b) for a, b in zip(whole, state(), strict=True))
