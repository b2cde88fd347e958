from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.starting_points import ZERO_TENSOR_RMS, initial_members
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.tiny_models import tiny_llama, with_lora

LAYOUT = Layout(("w", "zero"), ((100, 100), (100, 100)))
START = torch.cat([torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 3, torch.zeros(10_000)])


def members(
    start: Tensor, layout: Layout, chains: range | list[int], init_jitter: float = 0.1, seed: int = 0
) -> Tensor:
    return initial_members(layout, start, SGHMCConfig(prior_std=1.0, init_jitter=init_jitter), seed=seed, chains=chains)


def test_a_chains_start_depends_on_seed_and_chain_alone() -> None:
    four, one = members(START, LAYOUT, range(4)), members(START, LAYOUT, [2])
    assert torch.equal(four[2], one[0])
    assert not torch.equal(four[2], members(START, LAYOUT, [2], seed=1)[0])
    assert len({float(row[0]) for row in four}) == 4


def test_jitter_is_relative_to_each_tensors_size() -> None:
    jitter = LAYOUT.unflatten(members(START, LAYOUT, range(4)) - START)
    # 40,000 normals: their standard deviation is known to 1 / sqrt(80,000) = 0.35 %; four of these
    rms = float(START[:10_000].square().mean().sqrt())
    assert float(jitter["w"].std()) == pytest.approx(0.1 * rms, rel=0.014)
    assert float(jitter["zero"].std()) == pytest.approx(0.1 * ZERO_TENSOR_RMS, rel=0.014)


def test_without_jitter_chains_start_at_the_model() -> None:
    assert torch.equal(members(START, LAYOUT, range(2), init_jitter=0.0), START.expand(2, -1))


def test_each_chain_draws_the_random_factor_of_a_fresh_lora() -> None:
    model = with_lora(tiny_llama(hidden_size=64), init_b=0.0, r=16)
    layout = select(model)
    start = initial(model, layout)
    tensors, found = layout.unflatten(start), layout.unflatten(members(start, layout, range(8)))
    name = next(name for name in layout.names if ".lora_A." in name)
    correlation = torch.corrcoef(torch.cat([tensors[name].flatten()[None], found[name].flatten(1)]))
    # 1024 products: 0.03 is one standard error of a correlation of independent numbers
    assert (correlation - torch.eye(9)).abs().max() < 5 / 32
    assert float(found[name].std()) == pytest.approx(float(tensors[name].std()), rel=0.05)  # 1 / sqrt(16,384) = 0.8 %
    assert (found[name.replace("lora_A", "lora_B")].flatten(1).std(1) > 0).all()  # or R-hat would be blind


def test_a_trained_lora_is_jittered_like_anything_else() -> None:
    model = with_lora(tiny_llama())
    layout = select(model)
    start = initial(model, layout)
    found = members(start, layout, range(2), init_jitter=0.01)
    assert torch.corrcoef(torch.cat([start[None], found]))[0, 1] > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_starts_keep_the_dtype(dtype: torch.dtype) -> None:
    assert members(START.to(dtype), LAYOUT, range(2)).dtype == dtype
