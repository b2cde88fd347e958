"""TU, AU and EU of [8, 64, 32000] float32 logits against the formula as it is written, with softmax and log.

And against the formula in logarithms, which a probability that underflows does not make NaN. "torch.compile" is what
fused loops gain, which the package does not use (docs/benchmarks.md says why).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Line, Settings, in_child, interleave, peak_memory, ratio, timed
from hf_bayes.uncertainty.decomposition import Uncertainty, decompose

SHAPE = (8, 64, 32_000)
CHUNK = (8, 32, 8192)
"""The logits of a prefill of the benchmarks' model, 8 MB at a time."""
BLOCK = 16
"""Rows that are compiled for."""


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    logits = random_logits(settings.device)
    in_loops = compiled()
    functions = {"ours": decompose, "naive": naive, "torch.compile": in_loops}
    in_loops(logits)
    seconds = _seconds(settings, logits, {**functions, "in logarithms": in_logarithms, "reading": torch.sum})
    bound, loops, finite = (
        ratio(seconds[slow], seconds[fast])
        for slow, fast in (("naive", "reading"), ("naive", "torch.compile"), ("in logarithms", "ours"))
    )
    exact = naive(logits.double())
    errors = {
        name: max(float((a - b).abs().max()) for a, b in zip(function(logits), exact, strict=True))
        for name, function in functions.items()
    }
    peaks = {name: in_child("benchmarks.uncertainty:peak", name, settings.device) / 1e6 for name in ("ours", "naive")}
    work, unit = f"TU, AU, EU of {list(SHAPE)} logits", "x faster than naive"
    faster, memory = (7.0, 30.0) if settings.device == "cpu" else (None, None)  # of blocks that fit a CPU's caches
    small = _seconds(settings, random_logits(settings.device, CHUNK), {"ours": decompose, "naive": naive})
    return [
        Line("uncertainty", work, unit, *ratio(seconds["naive"], seconds["ours"]), faster, "least", bound=bound[0],
             others={"torch.compile": loops[0]}, seconds=seconds),
        Line("uncertainty", f"{work}, in logarithms", "x faster than log_softmax", *finite),
        Line("uncertainty", f"TU, AU, EU of {list(CHUNK)} logits", unit, *ratio(small["naive"], small["ours"]),
             seconds=small),
        Line("uncertainty", f"{work}: memory", "MB", peaks["ours"], limit=memory, others={"naive": peaks["naive"]}),
        Line("uncertainty", f"{work}: largest error", "nats", errors["ours"], limit=2e-6,
             others={name: errors[name] for name in ("naive", "torch.compile")}),
    ]  # fmt: skip


def _seconds(
    settings: Settings, logits: Tensor, functions: dict[str, Callable[[Tensor], Any]]
) -> dict[str, list[float]]:
    return interleave(
        {name: lambda f=function: timed(lambda: f(logits), settings.device) for name, function in functions.items()},
        3 * settings.rounds,
    )


def random_logits(device: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Members near one another, as those of a posterior are."""
    generator = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(1, *shape[1:], generator=generator)
    return (common + torch.randn(shape, generator=generator)).to(device)


def naive(logits: Tensor) -> Uncertainty:
    """H[mean p], mean H[p] and their difference."""
    probs = logits.softmax(-1)
    mean = probs.mean(0)
    total = -(mean * mean.log()).sum(-1)
    aleatoric = -(probs * probs.log()).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, total - aleatoric)


def in_logarithms(logits: Tensor) -> Uncertainty:
    """The same, finite where a probability underflows."""
    log_probs = logits.log_softmax(-1)
    log_mean = log_probs.logsumexp(0) - math.log(len(logits))
    total = -(log_mean.exp() * log_mean).sum(-1)
    aleatoric = -(log_probs.exp() * log_probs).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, total - aleatoric)


def compiled() -> Callable[[Tensor], Uncertainty]:
    """Return the decomposition as fused loops over a block: one for the norms, one for all sums over classes."""

    @torch.compile(dynamic=False, fullgraph=True)
    def block(logits: Tensor) -> Tensor:
        peak = logits.amax(-1, keepdim=True)
        powers = (logits - peak).exp()
        norm = powers.sum(-1, keepdim=True)
        log_norm, weight = norm.log(), 1 / (len(logits) * norm)
        mean = powers[0] * weight[0]
        for member in range(1, len(logits)):
            mean = mean + powers[member] * weight[member]
        log_mean, offset = mean.log().clamp_min(-200.0), log_norm.mean(0)
        divergence = torch.zeros_like(mean)
        for member in range(len(logits)):
            ratio_to_mean = logits[member] - peak[member] - (log_mean + offset)
            divergence = divergence + powers[member] * weight[member] * ratio_to_mean
        return torch.stack([-(mean * log_mean).sum(-1), divergence.sum(-1)])

    @torch.no_grad()
    def whole(logits: Tensor) -> Uncertainty:
        total, epistemic = torch.cat([block(rows) for rows in logits.split(BLOCK, 1)], -1)
        return Uncertainty(total, total - epistemic, epistemic)

    return whole


def peak(name: str, device: str) -> int:
    """Bytes that are needed beside the logits."""
    logits = random_logits(device)
    function = {"ours": decompose, "naive": naive}[name]
    function(logits[:, :1])
    return peak_memory(device, lambda: function(logits))
