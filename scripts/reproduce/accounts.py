"""The diagnostics of runs that a results page keeps and shows.

This module is not a command: the experiments in this folder import it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.reproduce.report import spread, table

DIAGNOSTICS = (
    *("verdict", "rhat", "rhat_terms", "rhat_logits", "ess", "ess_terms", "ess_logits"),
    *("num_values", "num_terms", "num_logits", "acceptance", "beyond_series", "capped", "divergences"),
    *("distance", "distance_in_noise", "kinetic_temperature", "kinetic_temperature_law"),
    *("kinetic_inside", "noise_ratio"),
)
"""The diagnostics of a run that are kept, as means over its chains."""

RHATS = ("rhat", "rhat_terms", "rhat_logits")


def account(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``DIAGNOSTICS`` that a run has."""
    found = {name: diagnostics.get(name) for name in DIAGNOSTICS}
    means = {name: statistics.fmean(value) if isinstance(value, list) else value for name, value in found.items()}
    return {name: value for name, value in means.items() if value is not None}


def accounts_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table with a line for each method over its seeds. R-hat is the worst of sum, single terms and logits."""
    rows = []
    for row, said in found.items():
        measured = {
            "distance": [one["distance"] for one in said if "distance" in one],
            "kinetic": [
                o["kinetic_temperature"] / o["kinetic_temperature_law"]
                for o in said
                if o.get("kinetic_temperature_law")
            ],
            "rhat": [max(one.get(name, 0.0) for name in RHATS) for one in said if "rhat" in one],
            "acceptance": [one["acceptance"] for one in said if "acceptance" in one],
        }
        complaints = dict.fromkeys(part.split(":")[0] for part in said[0]["verdict"].split("; "))
        told = "; ".join(part for part in complaints if part != "convergence not measured") or "-"
        rows.append([row, *(spread(values, 2) if values else "-" for values in measured.values()), told])
    return table(["method", "moved", "kinetic temperature / law", "R-hat", "acceptance", "verdict, first seed"], rows)
