"""The measurements of a run that converged."""

from __future__ import annotations

from hf_bayes.diagnostics.verdict import Diagnostics

GOOD = Diagnostics(
    dim=1000,
    distance=[0.3, 0.2, 0.3, 0.4],
    kinetic_temperature=[1.05, 1.0, 1.1, 1.02],
    kinetic_temperature_law=2 / 1.9,
    acceptance=[0.8, 0.79, 0.82, 0.8],
    divergences=[0, 0, 0, 0],
    num_moves=1000,
    rhat=1.01,
    ess=900.0,
)
