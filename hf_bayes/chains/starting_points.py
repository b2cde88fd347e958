"""The starting points of chains: seeded, over-dispersed, around the model's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator

ZERO_TENSOR_RMS = 0.01
"""The scale of the jitter of a tensor that is all zero (LoRA's B), as large as common initialisations."""


def initial_members(layout: Layout, start: Tensor, config: MethodConfig, *, seed: int, chains: Sequence[int]) -> Tensor:
    """Return [M, d]: ``start`` plus jitter of ``config.init_jitter`` times each tensor's RMS, chain by chain.

    A LoRA whose B is zero is new: its A is arbitrary, so each chain draws an A of its own, with the same RMS. The start
    of chain k is a function of (seed, k) alone.
    """
    tensors = layout.unflatten(start)
    scales, keeps = [], []
    for name in layout.names:
        rms = float(tensors[name].float().square().mean().sqrt())
        partner = tensors.get(name.replace(".lora_A.", ".lora_B.")) if ".lora_A." in name else None
        redraw = partner is not None and not bool(partner.any())
        scales.append(rms if redraw else config.init_jitter * (rms or ZERO_TENSOR_RMS))
        keeps.append(0.0 if redraw else 1.0)
    widths = _by_tensor(layout, scales, start)
    kept = _by_tensor(layout, keeps, start)
    noise = torch.stack(
        [torch.randn(layout.dim, generator=generator(seed, "start", chain), dtype=start.dtype) for chain in chains]
    ).to(start.device)
    return kept * start + widths * noise


def _by_tensor(layout: Layout, values: Sequence[float], like: Tensor) -> Tensor:
    """Return [d]: one value per tensor, repeated over its elements."""
    sizes = torch.tensor(layout.sizes)
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(sizes).to(like.device)
