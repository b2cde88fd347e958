"""Evaluation and generation in a single pass against one model without members, and against M members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Line, Settings, Work, compare, interleave
from benchmarks.linearised import LENGTH, NAMES, NEW, PROMPT, ROWS, evaluation, generation, loaded


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    lines = []
    for where, name in NAMES.items():
        model = loaded(settings, where)
        works = {
            f"single-pass evaluation {ROWS} x {LENGTH}, {name}": evaluation(settings, model),
            f"single-pass generation, {NEW} new tokens after {PROMPT}, {name}": generation(settings, model),
        }
        for work, timed in works.items():
            seconds = interleave(three(model, timed), settings.rounds)
            members = f"{settings.num_members} members"
            seconds[members] = seconds.pop("members")
            lines.append(compare("single_pass", work, seconds, ours="single pass", others=(members,)))
    return lines


def three(model: Any, work: Callable[[], float]) -> dict[str, Work]:
    """``work`` by one member, by all members, and in a single pass; changing between them is not timed."""

    def one() -> float:
        model.linearise(None)
        with model.showing(model.theta[:1]):
            return work()

    def members() -> float:
        model.linearise(None)
        return work()

    def single_pass() -> float:
        model.single_pass()
        return work()

    return {"single": one, "members": members, "single pass": single_pass}
