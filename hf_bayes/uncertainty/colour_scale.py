"""The colour scale of a heat map: it maps nats to levels, and its legend states the fixed end of the scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]

NUM_LEVELS = 24
PARTS = ("total", "aleatoric", "epistemic")
REFERENCES = {"epistemic": 1.0, "aleatoric": 4.0, "total": 4.0}
"""Nats at the dark end of the scale. They are the same for every text and posterior, so a colour always means the same
number. At 1 nat of epistemic uncertainty the perplexity of the mixture is e = 2.7 times the perplexity of its members.
4 nats of entropy are as open as a choice among 55 equally probable tokens."""


class Scale(NamedTuple):
    """A map from nats to levels: 0 nats have level 0, and ``vmax`` nats or more have the last level.

    The level grows with the square root of the number, because most tokens have a small fraction of ``vmax``.

    Attributes:
        measure: one of ``PARTS``.
        vmax: nats at the dark end.
        num_above: the number of tokens above ``vmax``.
        num_tokens: the number of all tokens.
        num_members: M, if it is known, the same for all records, and log M bounds the epistemic uncertainty. It does
            not at a temperature of the mixture other than 1.
    """

    measure: str
    vmax: float
    num_above: int
    num_tokens: int
    num_members: int | None

    def level(self, token: Record) -> int:
        """Return the level of a token, given its record."""
        share = min(1.0, max(0.0, token[self.measure] / self.vmax))
        return round(math.sqrt(share) * NUM_LEVELS)

    @property
    def ticks(self) -> list[str]:
        """The labels at the beginning, the middle and the end of the scale."""
        return ["0", f"{self.vmax / 4:.3g}", f"{'≥ ' if self.num_above else ''}{nats(self.vmax)}"]

    @property
    def legend(self) -> str:
        """The meaning of the darkest colour, in words."""
        notes = []
        if self.measure == "epistemic" and self.num_members is not None:
            notes.append(f"log {self.num_members} = {math.log(self.num_members):.3g} is the largest possible")
        if self.num_above:
            notes.append(f"{self.num_above} of {self.num_tokens} tokens are above it, and drawn as dark")
        return f"darkest = {nats(self.vmax)}" + (f" ({'; '.join(notes)})" if notes else "")


def scale_of(records: Sequence[Record], measure: str, vmax: float | None) -> Scale:
    """Return one scale for all records that are shown together.

    Args:
        records: the records that the generation pipeline returns.
        measure: one of ``PARTS``.
        vmax: nats at the dark end; None takes the value in ``REFERENCES``.
    Raises:
        ValueError: if ``measure`` is unknown, or ``vmax`` is not positive and finite.
    """
    if measure not in PARTS:
        raise ValueError(f"measure is one of {', '.join(PARTS)}; got {measure!r}")
    if vmax is not None and not 0 < vmax < math.inf:
        raise ValueError(f"vmax is the end of the colour scale, a positive number of nats; got {vmax}")
    end = REFERENCES[measure] if vmax is None else vmax
    values = [token[measure] for record in records for token in record["tokens"]]
    members = {None if "mixture_temperature" in record else record.get("num_members") for record in records}
    known = members.pop() if len(members) == 1 else None
    return Scale(measure, end, sum(value > end for value in values), len(values), known)


def nats(value: float) -> str:
    """Return the number with its unit."""
    return f"{value:.3g} nat{'' if value == 1 else 's'}"
