"""The updates at which draws are taken, and schedules of step size and temperature between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from hf_bayes.core.number_checks import is_number


def burn_in_steps(burn_in: float | None, num_steps: int) -> int:
    """Return ``burn_in`` as a number of updates; below 1 it is a fraction of the run. None means a half."""
    if burn_in is None:
        return num_steps // 2
    return int(burn_in * num_steps) if burn_in < 1 else int(burn_in)


def draw_steps(num_steps: int, *, burn_in: int, draws: int, thin: int | None) -> range:
    """Return the updates (counted from 1) after which a draw is taken; the last draw is at the last update.

    Args:
        num_steps: number of updates in the run.
        burn_in: number of updates before the first draw.
        draws: number of draws.
        thin: number of updates between draws; None spreads them evenly over the updates after burn-in.
    Raises:
        ValueError: if the run is too short for these draws.
    """
    spacing = thin if thin is not None else (num_steps - burn_in) // draws
    first = num_steps - spacing * (draws - 1)
    if spacing < 1 or first <= burn_in:
        collected = max(0, (num_steps - burn_in) // spacing) if spacing > 0 else 0
        raise ValueError(
            f"{num_steps} updates with burn_in={burn_in} and thin={thin} cannot give {draws} draws per chain "
            f"(would collect {collected} samples): train longer, or lower "
            "burn_in, thin or draws_per_chain"
        )
    return range(first, num_steps + 1, spacing)


def place_in_cycle(step: int, draws: range) -> int:
    """Return the number of updates since the beginning of the cycle that contains update ``step`` (from 0).

    A cycle ends with each draw, and the next cycle follows. The number is negative before the first whole cycle.
    """
    begin = draws.start % draws.step
    return (step - begin) % draws.step if step >= begin else step - begin


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """The learning rate and the temperature over a run, as ``MethodConfig.schedule`` sets them for any rule.

    ``step`` counts updates from 0, without the updates of a warm start. ``draws`` are the updates (from 1) that end in
    a draw.
    """

    name: str = field(init=False)

    @abstractmethod
    def learning_rate(self, step: int, draws: range) -> float:
        """Return l_t / l_0 of an update, in (0, 1]."""

    def temperature(self, step: int, draws: range) -> float:
        """Return T_t / T of an update, in [0, 1]."""
        return 1.0

    @property
    def has_ramp(self) -> bool:
        """True if the temperature ever differs from T."""
        return False

    def check(self, draws: range) -> None:  # noqa: B027 (most schedules accept any draws)
        """Raise a ValueError if the draws are too close together for the schedule."""


@dataclass(frozen=True, kw_only=True)
class Cyclical(Schedule):
    """Cosine cycles with one draw at the end of each cycle (Zhang et al. 2020; cold_posteriors Algorithm 1).

        C(t) = (cos(pi p) + 1) / 2,  h_t = C(t) h_0,  l_t = C(t)^2 l_0          p in [0, 1): the place in the cycle

    l_t = C(t) l_0 (``exponent=1``) is the cycle of snapshot ensembles (Huang et al. 2017).

    A cycle is the interval from one draw to the next. Burn-in has cycles of the same length: 30 cycles, the first 3 of
    them unused, are draws_per_chain=27 and burn_in=0.1. If the run is not a multiple of the cycle length, the remaining
    updates come first, at the peak.

    Draws after a ramp are too cold, since the learning rate falls while the chain still warms up. Shorter ramps and
    longer cycles make them less cold (docs/scale.md has figures). The kinetic temperature, which is then below its law,
    shows the effect.

    Attributes:
        ramp_up: the share of a cycle in which the temperature rises linearly from 0 to T; 0 keeps it at T.
        exponent: the exponent of C(t) in the learning rate.
    """

    name: str = field(default="cyclical", init=False)
    ramp_up: float = 0.0
    exponent: float = 2.0

    def __post_init__(self) -> None:
        _check_number(self, "ramp_up", self.ramp_up, 0 <= _number(self.ramp_up) < 1, "in [0, 1)")
        _check_number(self, "exponent", self.exponent, 0 < _number(self.exponent) < math.inf, "> 0")

    def learning_rate(self, step: int, draws: range) -> float:
        cosine: float = (math.cos(math.pi * self._share(step, draws)) + 1) / 2
        return float(cosine**self.exponent)

    def temperature(self, step: int, draws: range) -> float:
        return min(1.0, self._share(step, draws) / self.ramp_up) if self.ramp_up else 1.0

    @staticmethod
    def _share(step: int, draws: range) -> float:
        """Return p, the place in the cycle."""
        return max(0, place_in_cycle(step, draws)) / draws.step

    @property
    def has_ramp(self) -> bool:
        return self.ramp_up > 0

    def check(self, draws: range) -> None:
        if draws.step < 2:
            raise ValueError(
                f"schedule 'cyclical' needs cycles of at least 2 updates, got {draws.step} from one draw to the next: "
                "train longer, lower draws_per_chain or raise thin"
            )


@dataclass(frozen=True, kw_only=True)
class RobbinsMonro(Schedule):
    """Decreasing steps l_t = a (b + t)^-gamma (Welling and Teh 2011; Robbins and Monro 1951), a = l_0 b^gamma.

    sum l_t diverges and sum l_t^2 does not. So chains forget their start, while the bias of the discretisation goes to
    zero. Draws have equal weights.

    Attributes:
        offset: b, a number of updates. After b updates the learning rate has fallen by the factor 2^-gamma.
        exponent: gamma in (1/2, 1].
    """

    name: str = field(default="robbins_monro", init=False)
    offset: float
    exponent: float = 0.55

    def __post_init__(self) -> None:
        _check_number(self, "offset", self.offset, 0 < _number(self.offset) < math.inf, "> 0")
        _check_number(self, "exponent", self.exponent, 0.5 < _number(self.exponent) <= 1, "in (1/2, 1]")

    def learning_rate(self, step: int, draws: range) -> float:
        return float((1 + step / self.offset) ** -self.exponent)


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Steps that fall linearly, from l_0 in the first update to l_0 / n in update n: for optimisers.

    The last draw is taken after update n. Further updates, of which no draw is taken, stay at l_0 / n.
    """

    name: str = field(default="linear", init=False)

    def learning_rate(self, step: int, draws: range) -> float:
        return max(1, draws[-1] - step) / draws[-1]


SCHEDULES: dict[str, type[Schedule]] = {"cyclical": Cyclical, "robbins_monro": RobbinsMonro, "linear": Linear}


def from_dict(values: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``dataclasses.asdict`` turned into ``values``.

    Raises:
        ValueError: for an unknown name or field, a missing field, or a value out of range.
    """
    name = values.get("name")
    if name not in list(SCHEDULES):  # a list also compares what has no hash
        raise ValueError(f"schedule must be a mapping with a name of {', '.join(SCHEDULES)}, got {name!r}")
    own = {key: value for key, value in values.items() if key != "name"}
    known = {item.name: item for item in fields(SCHEDULES[name]) if item.init}
    needed = {key for key, item in known.items() if item.default is MISSING}
    if not needed <= set(own) <= set(known):
        raise ValueError(f"schedule {name!r} must be given {', '.join(known)} and nothing else, got {sorted(own)}")
    return SCHEDULES[name](**own)


def _number(value: Any) -> float:
    return value if is_number(value) else math.nan


def _check_number(schedule: Schedule, name: str, value: Any, fine: bool, bound: str) -> None:
    if not fine:
        raise ValueError(f"schedule {schedule.name!r}: {name} must be a finite number {bound}, got {value!r}")
