"""The trace of a run: small curves for plots, saved with the posterior."""

from __future__ import annotations

import math
from typing import Any

MAX_POINTS = 200
"""Points of each curve: as many as a plot shows, and a small file."""


def logged_of_chains(log_history: list[dict[str, Any]], num_chains: int) -> dict[str, Any]:
    """Return {"step": [P], name: [P, K]}: the logged numbers of every chain."""
    entries = thinned([entry for entry in log_history if "loss/chain_0" in entry])
    names = sorted({key.split("/chain_")[0] for entry in entries[-1:] for key in entry if "/chain_" in key})
    chains = range(num_chains)
    curves = {name: [[entry.get(f"{name}/chain_{k}") for k in chains] for entry in entries] for name in names}
    return {"step": [entry["step"] for entry in entries], **{n: rounded(curve) for n, curve in curves.items()}}


def logged_convergence(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {"step", "rhat", "ess": [P]}: the convergence of the probe so far, as it was logged."""
    entries = thinned([entry for entry in log_history if "probe_rhat" in entry])
    if not entries:
        return {}
    values = {name: rounded([entry.get(f"probe_{name}") for entry in entries]) for name in ("rhat", "ess")}
    return {"step": [entry["step"] for entry in entries], **values}


def thinned(values: list[Any]) -> list[Any]:
    """Return at most ``MAX_POINTS`` of the values, spread evenly and including the last one."""
    step = -(-len(values) // MAX_POINTS) or 1
    return values[::-1][::step][::-1]


def rounded(value: Any) -> Any:
    """Round numbers to five digits, more than a plot shows."""
    match value:
        case list() | tuple():
            return [rounded(item) for item in value]
        case float() if math.isfinite(value):
            return float(f"{value:.5g}")
    return value
