"""The checks of all kernels before the first update."""

from __future__ import annotations

from torch import Tensor


def check_temperature(name: str, temperature: float) -> None:
    """Raise a ValueError at T = 0: exp(-U / T) has no density there, and a chain that only descends optimises badly."""
    if temperature == 0:
        raise ValueError(
            f"{name}: temperature must be > 0, got {temperature}: an accept-reject kernel has no T = 0 limit worth "
            'having. Use method="map" to optimise'
        )


def check_start(name: str, start: Tensor, gradient: Tensor | None = None) -> None:
    """Raise an error if a chain starts where the energy [M] or its gradient [M, d] is not finite."""
    finite = start.isfinite() if gradient is None else start.isfinite() & gradient.isfinite().all(1)
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"{name}: chain {bad[0]} starts where the energy ({start[bad[0]].item():g}) or its gradient is not finite "
            f"({len(bad)} of {len(start)} chains do): use a smaller init_jitter or a warm start"
        )
