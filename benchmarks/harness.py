"""Interleaved timing, ratios of minima with a bootstrap interval, peak memory of a child process, the machine."""

from __future__ import annotations

import ctypes
import json
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Subject

Work = Callable[[], float]
"""A function that does a piece of work once and returns its seconds."""

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Settings:
    """The settings of all groups.

    Attributes:
        subject: the model.
        num_members: M.
        rounds: interleaved repetitions.
        posteriors_python: an interpreter that has the ``posteriors`` package; None leaves its lines out.
    """

    subject: Subject
    num_members: int
    rounds: int
    posteriors_python: str | None = None

    @property
    def device(self) -> str:
        return self.subject.device


@dataclass(frozen=True)
class Line:
    """A number of the table, and what it has to reach.

    Attributes:
        group, work: which benchmark, and what it does.
        unit: of ``value``.
        value: best estimate; ``interval`` its bootstrap 90 % interval, None for what does not vary from run to run.
        limit: None where there is only something to report.
        at: "most" or "least": the side of the limit on which ``value`` should be.
        bound: the least value that counting operations (or bytes, where these decide) allows.
        others: the same work done by others, in the same unit.
        seconds: of every round, by who did the work.
    """

    group: str
    work: str
    unit: str
    value: float
    interval: tuple[float, float] | None = None
    limit: float | None = None
    at: str = "most"
    bound: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Return whether the interval reaches the limit."""
        if self.limit is None:
            return None
        low, high = self.interval or (self.value, self.value)
        return low <= self.limit if self.at == "most" else high >= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


# -- time ------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of one call, with everything that it put on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait for all that was put on an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize()


def interleave(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of every work in every round, after one that does not count; the order rotates from round to round."""
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        works[name]()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(works[name]())
    return seconds


def ratio(ours: Sequence[float], single: Sequence[float], times: float = 1.0) -> tuple[float, tuple[float, float]]:
    """``times * min(ours) / min(single)`` and its bootstrap 90 % interval over rounds, which both share."""
    draw = random.Random(0)
    estimates = []
    for _ in range(2000):
        rounds = draw.choices(range(len(ours)), k=len(ours))
        estimates.append(times * min(ours[i] for i in rounds) / min(single[i] for i in rounds))
    estimates.sort()
    return times * min(ours) / min(single), (estimates[100], estimates[-101])


def compare(
    group: str,
    work: str,
    seconds: dict[str, list[float]],
    *,
    ours: str = "ours",
    single: str = "single",
    unit: str = "x single",
    limit: float | None = None,
    bound: float | None = None,
    times: float = 1.0,
    others: Sequence[str] = (),
) -> Line:
    """A line from the seconds of ``interleave``."""
    value, interval = ratio(seconds[ours], seconds[single], times)
    beside = {name: times * min(seconds[name]) / min(seconds[single]) for name in others if name in seconds}
    kept = {name: seconds[name] for name in (ours, single, *beside)}
    return Line(group, work, unit, value, interval, limit, bound=bound, others=beside, seconds=kept)


# -- memory ----------------------------------------------------------------------------------------------------------


def peak_memory(device: str, work: Callable[[], Any]) -> int:
    """Bytes by which memory grew at most during ``work``; of the process on CPU, of tensors on an accelerator."""
    if device != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        work()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - before
    _return_free_memory()
    before = _reset_high_water()
    work()
    return _high_water() - before


def in_child(function: str, *arguments: Any) -> Any:
    """``function(*arguments)`` ("module:name", JSON in and out) in a process of its own, where memory is fresh."""
    module, name = function.split(":")
    program = (
        f"import json, sys, torch; torch.set_num_threads({torch.get_num_threads()}); "
        f"from {module} import {name} as work; "
        "print('RESULT' + json.dumps(work(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} failed in its own process:\n{done.stderr}")
    return json.loads(done.stdout.rsplit("RESULT", 1)[1])


def _return_free_memory() -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_high_water() -> int:
    """Resident bytes now; on Linux the high water mark starts again from there, elsewhere it is what it is."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _high_water()


def _high_water() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


# -- the machine -----------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Return a description of the machine on which the numbers were measured."""
    return {
        "processor": _processor(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft", "hf_bayes")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        flags = [line for line in info.read_text().splitlines() if line.startswith("flags")]
        widest = "AVX-512" if flags and "avx512f" in flags[0] else "AVX2" if flags and "avx2" in flags[0] else ""
        if named:
            return f"{named[0]}, {widest}" if widest else named[0]
    return platform.processor() or platform.machine()
