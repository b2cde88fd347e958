"""The check of all kernels before the first update."""

from __future__ import annotations


def check_temperature(name: str, temperature: float) -> None:
    """Raise a ValueError at T = 0: exp(-U / T) has no density there, and a chain that only descends optimises badly."""
    if temperature == 0:
        raise ValueError(
            f"{name}: temperature must be > 0, got {temperature}: an accept-reject kernel has no T = 0 limit worth "
            'having. Use method="map" to optimise'
        )
