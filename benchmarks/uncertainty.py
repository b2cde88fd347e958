"""TU, AU and EU of [8, 64, 32000] float32 logits against the formula as it is written, with softmax and log.

And against the formula in logarithms, which a probability that underflows does not make NaN. "torch.compile" is what
fused loops gain, which the package does not use (docs/benchmarks.md says why).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Line, Settings, in_child, interleave, peak_memory, ratio, timed
from hf_bayes.uncertainty import Uncertainty, decompose

SHAPE = (8, 64, 32_000)
BLOCK = 16
"""Rows that are compiled for; of 2 to 64 the fastest on two cores."""


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    logits = random_logits(settings.device)
    in_loops = compiled()
    in_loops(logits)
    seconds = interleave(
        {
            "ours": lambda: timed(lambda: decompose(logits), settings.device),
            "naive": lambda: timed(lambda: naive(logits), settings.device),
            "in logarithms": lambda: timed(lambda: in_logarithms(logits), settings.device),
            "torch.compile": lambda: timed(lambda: in_loops(logits), settings.device),
            "reading": lambda: timed(lambda: logits.sum(), settings.device),
        },
        3 * settings.rounds,
    )
    value, interval = ratio(seconds["naive"], seconds["ours"])
    bound, _ = ratio(seconds["naive"], seconds["reading"])
    loops, _ = ratio(seconds["naive"], seconds["torch.compile"])
    finite, finite_interval = ratio(seconds["in logarithms"], seconds["ours"])
    exact = naive(logits.double())
    errors = {
        name: max(float((a - b).abs().max()) for a, b in zip(function(logits), exact, strict=True))
        for name, function in (("ours", decompose), ("naive", naive), ("torch.compile", in_loops))
    }
    peaks = {name: in_child("benchmarks.uncertainty:peak", name, settings.device) / 1e6 for name in ("ours", "naive")}
    work = f"TU, AU, EU of {list(SHAPE)} logits"
    return [
        Line("uncertainty", work, "x faster than naive", value, interval, 7.0, "least", bound=bound,
             others={"torch.compile": loops}, seconds=seconds),
        Line("uncertainty", f"{work}, in logarithms", "x faster than log_softmax", finite, finite_interval),
        Line("uncertainty", f"{work}: memory", "MB", peaks["ours"], limit=30.0, others={"naive": peaks["naive"]}),
        Line("uncertainty", f"{work}: largest error", "nats", errors["ours"], limit=2e-6,
             others={name: errors[name] for name in ("naive", "torch.compile")}),
    ]  # fmt: skip


def random_logits(device: str) -> Tensor:
    """Members near one another, as those of a posterior are."""
    generator = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(1, *SHAPE[1:], generator=generator)
    return (common + torch.randn(SHAPE, generator=generator)).to(device)


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
    """What fused loops over a block make of it: the norms in one, all sums over classes in the other."""

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
