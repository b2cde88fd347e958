"""The time of a forward: operations by kind, and its rate beside what the machine does at best.

Operations are timed under torch's profiler, which slows Python down; shares are of that run (in decoding, with its
prompt). The rate is of a run without it, in what limits the work: multiply-adds of prefill, numbers read in decoding
(weights, keys and values), as counted in ``bounds``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import profile

from benchmarks import bounds
from benchmarks.decode import NEW, PROMPT, bayesian, greedy
from benchmarks.harness import Settings, Work, timed
from benchmarks.models import WHERE, tokens
from benchmarks.prefill import LENGTH, ROWS, forward
from benchmarks.uncertainty import random_logits
from hf_bayes.uncertainty.decomposition import decompose

KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmv", "mv"),
    "attention": ("_scaled_dot_product",),
    "copies": ("cat", "copy_", "index", "index_select", "repeat", "contiguous", "clone"),
    "reductions": ("sum", "mean", "amax", "max", "argmax", "any", "all"),
    "elementwise": (),
}
"""Names of aten operations; what is in none is elementwise, views included."""

REPEATS = 5


@dataclass(frozen=True)
class Breakdown:
    """A row of the table.

    Attributes:
        work: what was run.
        seconds: of one run, the least of several.
        shares: of the profiled run's time by kind; "Python" is what no operation accounts for.
        rate: counted work over ``seconds``, as a share of the machine's best.
        limit: what that best is of.
    """

    work: str
    seconds: float
    shares: dict[str, float]
    rate: float | None
    limit: str


def measure(settings: Settings) -> dict[str, Any]:
    """The machine's best rates, and a row for each work."""
    subject, count = settings.subject, settings.num_members
    best = {"products": best_products(settings.device), "reading": best_reading(settings.device)}
    plain, last, every = subject.plain(), bayesian(settings, count, WHERE[1]), bayesian(settings, count, WHERE[0])
    prompt, ids = tokens(plain, 1, PROMPT), tokens(plain, ROWS, LENGTH)
    logits = random_logits(settings.device)
    length = PROMPT + NEW // 2
    read, products = bounds.single_read(subject, length), ROWS * LENGTH * bounds.single_products(subject, LENGTH)
    rows = [
        ("decode, single", greedy(plain, prompt), NEW * read, "reading"),
        ("decode, LoRA on the last layer", greedy(last, prompt),
         NEW * read * bounds.decode(subject, WHERE[1], count, length), "reading"),
        ("decode, LoRA on all layers", greedy(every, prompt),
         NEW * read * bounds.decode(subject, WHERE[0], count, length), "reading"),
        ("prefill, single", forward(plain, ids), products, "products"),
        ("prefill, LoRA on the last layer", forward(last, ids),
         products * bounds.prefill(subject, WHERE[1], count, LENGTH, heads=LENGTH), "products"),
        ("prefill, LoRA on all layers", forward(every, ids),
         products * bounds.prefill(subject, WHERE[0], count, LENGTH, heads=LENGTH), "products"),
        ("TU, AU, EU", lambda: timed(lambda: decompose(logits), settings.device), logits.numel(), "reading"),
    ]  # fmt: skip
    found = [look(name, work, counted, best[limit], limit) for name, work, counted, limit in rows]
    return {"best": best, "rows": [asdict(row) for row in found]}


def look(name: str, work: Work, counted: float, best: float, limit: str) -> Breakdown:
    """Time a work, and profile it once."""
    work()
    seconds = min(work() for _ in range(REPEATS))
    with profile() as found:
        start = time.perf_counter()
        work()
        whole = time.perf_counter() - start
    own = dict.fromkeys(KINDS, 0.0)
    for event in found.key_averages():
        if event.key.startswith("aten::"):
            own[kind_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total / 1e6
    shares = {kind: value / whole for kind, value in own.items()}
    return Breakdown(name, seconds, {**shares, "Python": 1 - sum(shares.values())}, counted / seconds / best, limit)


def kind_of(operation: str) -> str:
    """Return the kind of an aten operation."""
    for kind, names in KINDS.items():
        if operation in names or any(operation.startswith(name) for name in names if name.startswith("_")):
            return kind
    return "elementwise"


def best_products(device: str, size: int = 2048) -> float:
    """float32 multiply-adds a second in a product of large square matrices."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return size**3 / _least(lambda: timed(lambda: a @ b, device))


def best_reading(device: str, size: int = 1 << 26) -> float:
    """float32 numbers a second in a sum over more than the caches hold."""
    numbers = torch.randn(size, device=device)
    return size / _least(lambda: timed(lambda: numbers.sum(), device))


def _least(work: Callable[[], float]) -> float:
    return min(work() for _ in range(REPEATS))
