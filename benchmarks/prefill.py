"""One forward over whole sequences, 4 x 128: the mixture of all logits with its uncertainties, or of the last token's.

And the members' logits alone, which is what a loop over adapters ends in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import bounds
from benchmarks.decode import bayesian, with_adapters
from benchmarks.harness import Line, Settings, Work, compare, interleave, timed
from benchmarks.models import WHERE, adapter_name, tokens

ROWS, LENGTH = 4, 128
MEMBERS = ", members' logits"


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    subject, count = settings.subject, settings.num_members
    plain = subject.plain()
    ids = tokens(plain, ROWS, LENGTH)
    on_last, on_all = bayesian(settings, count, WHERE[1]), bayesian(settings, count, WHERE[0])
    loop_last, loop_all = with_adapters(settings, WHERE[1]), with_adapters(settings, WHERE[0])
    rows = ids.repeat(count, 1)
    names = {"adapter_names": [adapter_name(member) for member in range(count) for _ in range(ROWS)]}
    seconds = interleave(
        {
            "single": forward(plain, ids),
            "last": forward(on_last, ids),
            "all": forward(on_all, ids),
            "last" + MEMBERS: logits(on_last, ids),
            "all" + MEMBERS: logits(on_all, ids),
            "last: set_adapter": loop(loop_last, ids, count),
            "all: set_adapter": loop(loop_all, ids, count),
            "last: adapter_names": forward(loop_last, rows, **names),
            "all: adapter_names": forward(loop_all, rows, **names),
            "single, last token": forward(plain, ids, logits_to_keep=1),
            "last, last token": forward(on_last, ids, logits_to_keep=1),
            "last, last token: set_adapter": loop(loop_last, ids, count, logits_to_keep=1),
            "last, last token: adapter_names": forward(loop_last, rows, logits_to_keep=1, **names),
        },
        settings.rounds,
    )
    work = f"prefill {ROWS} x {LENGTH}, LoRA on"

    def line(what: str, where: str, short: str, limit: float, ours: str = "", against: str = "") -> Line:
        others = ("set_adapter", "adapter_names")
        keys = {"ours": short + ours, "single": "single" + against}
        keys |= {name: f"{short}{against}: {name}" for name in others}
        kept = {name: seconds[key] for name, key in keys.items()}
        bound = bounds.prefill(subject, where, count, LENGTH, heads=1 if against else LENGTH)
        return compare("prefill", f"{work} {where}, M={count}{what}", kept, limit=limit, bound=bound, others=others)

    return [
        line("", WHERE[1], "last", 2.7),
        line(MEMBERS, WHERE[1], "last", 2.7, ours=MEMBERS),
        line(", logits of the last token", WHERE[1], "last", 1.65, ours=", last token", against=", last token"),
        line("", WHERE[0], "all", 8.0),
        line(MEMBERS, WHERE[0], "all", 8.0, ours=MEMBERS),
    ]


def forward(model: Any, ids: Tensor, **kwargs: Any) -> Work:
    """A forward without cache."""

    @torch.no_grad()
    def work() -> float:
        return timed(lambda: model(ids, use_cache=False, **kwargs), ids.device.type)

    return work


def logits(model: Any, ids: Tensor) -> Work:
    """The logits of every member at every position that has a next token (127 of 128), kept as they are."""

    @torch.no_grad()
    def work() -> float:
        inputs = {"input_ids": ids, "labels": ids}
        return timed(lambda: model.each_term(inputs, lambda found, _: found), ids.device.type)

    return work


def loop(model: Any, ids: Tensor, count: int, **kwargs: Any) -> Work:
    """A forward of each adapter after the other; their logits are kept, as a mixture would need them."""

    @torch.no_grad()
    def work() -> float:
        def members() -> list[Tensor]:
            logits = []
            for member in range(count):
                model.set_adapter(adapter_name(member))
                logits.append(model(ids, use_cache=False, **kwargs).logits)
            return logits

        return timed(members, ids.device.type)

    return work
