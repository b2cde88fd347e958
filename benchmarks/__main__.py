"""``python -m benchmarks``: measure, print, and keep a full run for the table of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers

from benchmarks import breakdown, table
from benchmarks.harness import Line, Settings, machine
from benchmarks.models import SHAPES, Subject

GROUPS = {
    "cpu": ("decode", "prefill", "training", "uncertainty", "generation", "overhead", "laplace", "linearised",
            "single_pass", "updates"),
    "cuda": ("accelerator", "generation", "uncertainty"),
}  # fmt: skip
SUBJECTS = {"cpu": ("30M", "float32", 8), "cuda": ("8B", "bfloat16", 10)}
"""Shape, dtype and M."""


def main(arguments: list[str]) -> None:
    """The command."""
    options = _parse(arguments)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    shape, dtype, members = SUBJECTS[options.device]
    subject = Subject(options.shape or shape, options.device, dtype)
    settings = Settings(subject, members, options.rounds or (3 if options.quick else 9), options.posteriors)
    busy = os.getloadavg()[0]
    lines: list[Line] = []
    for group in options.only or GROUPS[options.device]:
        for line in importlib.import_module(f"benchmarks.{group}").measure(settings):
            print(table.row(line.to_json()), flush=True)
            lines.append(line)
    complete = options.only is None and not options.quick and options.shape is None
    full_size = options.device == "cpu" and not options.quick and options.shape is None
    record = {
        "machine": machine(options.device),
        "load_before": busy,
        "model": subject.shape,
        "dtype": dtype,
        "num_members": members,
        "rounds": settings.rounds,
        "lines": [line.to_json() for line in lines],
        "breakdown": breakdown.measure(settings) if full_size and (complete or options.output) else None,
    }
    where = options.output or (table.RESULTS / f"{options.device}.json" if complete else None)
    if where is None:
        print("not kept: a run for docs/benchmarks.md has all groups and is not --quick")
        return
    where.parent.mkdir(exist_ok=True)
    where.write_text(json.dumps(record, indent=1) + "\n")
    if complete:
        table.write()


def _parse(arguments: list[str]) -> argparse.Namespace:
    every = sorted({group for groups in GROUPS.values() for group in groups})
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=GROUPS, default="cpu")
    parser.add_argument("--only", nargs="+", choices=every, help="these groups; the result is printed, not kept")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (9, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that all runs")
    parser.add_argument("--shape", choices=SHAPES, help="another model; the result is printed, not kept")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU (2)")
    parser.add_argument("--output", type=Path, help="keep the result in this file, whatever was measured")
    parser.add_argument(
        "--posteriors",
        default=os.environ.get("POSTERIORS_PYTHON"),
        help="python of an environment with the package posteriors, torch, transformers and peft",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
