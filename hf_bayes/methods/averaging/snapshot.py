"""Snapshot ensembles: SGD with a cyclical rate, and a member at the end of each cycle (Huang et al. 2017).

The update is the update of ``sgd_mc``. A cycle is the interval from one draw to the next (``schedules.Cyclical``). Its
rate is l_0 C(t) as in their paper, not l_0 C(t)^2. There is no stationary law: each cycle ends near a mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_bayes.core.schedules import Cyclical, Schedule
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig

CYCLES = Cyclical(exponent=1.0)


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(SGDMCConfig):
    """An ensemble from ``draws_per_chain`` cycles of SGD after burn-in; each cycle ends in a member of equal weight."""

    name: ClassVar[str] = "snapshot"
    draws_per_chain: int = 5
    burn_in: float = 0.0
    momentum: float = 0.9
    schedule: Schedule | None = CYCLES
