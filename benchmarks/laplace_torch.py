"""Laplace fits of sequence classifiers by ``fit_laplace`` and by ``laplace-torch``, round by round.

``LAPLACE_TORCH_PYTHON=... python -m benchmarks.laplace_torch`` writes benchmarks/results/laplace_torch.json and the
table of docs/laplace.md. That python's environment holds laplace-torch, and torch, transformers and peft as in
constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.classifier import BATCH, LENGTH, NUM_ROWS, PRIOR_STD, WORKS, classifier, rows
from benchmarks.harness import ROOT, in_child, interleave, machine, peak_memory, ratio, timed
from benchmarks.table import RESULTS, replaced
from hf_bayes import LaplaceConfig, Posterior, fit_laplace
from hf_bayes.distributions.covariance import Kronecker, KroneckerBlock

DOCUMENT = ROOT / "docs" / "laplace.md"
LIMITS = {"head": 1.0, "lora": 10.0}
"""Times faster than laplace-torch, at least."""


def fit(model: Any, work: str) -> Posterior:
    """The exact GGN, without the gradient at the weights, which laplace-torch does not look for."""
    todo = WORKS[work]
    config = LaplaceConfig(structure=todo.structure, num_samples=None, prior_std=PRIOR_STD, check_gradient=False)
    subspace = "last_layer" if todo.where == "head" else "trainable"
    return fit_laplace(model, rows(model.config.num_labels), config, batch_size=BATCH, subspace=subspace)


def once(work: str) -> dict[str, float]:
    """Memory of a fit, the trace of its curvature, and the operations counted in it."""
    warnings.filterwarnings("ignore")
    model = classifier(WORKS[work])
    kept: list[Posterior] = []
    fit(model, work)
    peak = peak_memory("cpu", lambda: kept.append(fit(model, work)))
    with FlopCounterMode(display=False) as counter:
        fit(model, work)
    return {"peak": peak, "trace": _trace(kept[0]), "flops": counter.get_total_flops()}


def _trace(posterior: Posterior) -> float:
    """Return the trace of H, the posterior's precision without the prior's."""
    (covariance,) = posterior.approximation.covariances
    blocks = covariance.blocks if isinstance(covariance, Kronecker) else [covariance]
    variances = [block.variances if isinstance(block, KroneckerBlock) else block.variance for block in blocks]
    return sum(float((value.double().reciprocal() - PRIOR_STD**-2).sum()) for value in variances)


def measure(python: str, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of every round, bytes and traces, by work."""
    start = [python, "-W", "ignore", "-m", "benchmarks.laplace_torch_step", str(threads)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    version = "from importlib.metadata import version as v; print(v('laplace-torch'))"
    version = subprocess.run([python, "-c", version], check=True, **pipes).stdout.strip()
    models, busy = {name: classifier(work) for name, work in WORKS.items()}, os.getloadavg()[0]
    works: dict[str, Any] = {}
    with subprocess.Popen(start, stdin=subprocess.PIPE, **pipes) as process:

        def theirs(work: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{work}\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        for work in WORKS:
            both = {
                "ours": lambda work=work: timed(lambda: fit(models[work], work)),
                "laplace-torch": lambda work=work: theirs(work),
            }
            works[work] = {"seconds": interleave(both, rounds)}
    for work, found in works.items():
        done = subprocess.run([*start, "--once", work], check=True, **pipes)
        found["ours"] = in_child("benchmarks.laplace_torch:once", work)
        found["laplace-torch"] = json.loads(done.stdout.rsplit("RESULT", 1)[1])
    about = {**machine("cpu"), "threads": threads, "laplace-torch": version}
    return {"machine": about, "load_before": busy, "rounds": rounds, "works": works}


def render(record: dict[str, Any]) -> str:
    """The table of a run."""
    about = record["machine"]
    lines = [
        f"{NUM_ROWS} rows of {LENGTH} tokens in batches of {BATCH}, float32, exact GGN; {record['rounds']} rounds. "
        f"{about['processor']}, {about['threads']} threads, "
        f"torch {about['torch']}, laplace-torch {about['laplace-torch']}; load {record['load_before']:.1f} beforehand.",
        "",
        "| fit | s | GFLOP | laplace-torch: s | times faster | 90 % interval | wanted | memory | laplace-torch: memory "
        "| ratio of tr H |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for work, found in record["works"].items():
        ours, theirs = found["seconds"]["ours"], found["seconds"]["laplace-torch"]
        value, (low, high) = ratio(theirs, ours)
        flops = found["ours"]["flops"] / 1e9
        limit = LIMITS[WORKS[work].where]
        wanted = f"at least {limit:g}" + ("" if high >= limit else ": missed")
        memory = [f"{found[name]['peak'] / 1e6:.0f} MB" for name in ("ours", "laplace-torch")]
        lines.append(
            f"| {work} | {min(ours):.3g} | {flops:.3g} | {min(theirs):.3g} | {value:.3g} | {low:.3g} to {high:.3g} "
            f"| {wanted} | {' | '.join(memory)} | {found['ours']['trace'] / found['laplace-torch']['trace']:.6f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.laplace_torch", description=__doc__)
    parser.add_argument("--python", default=os.environ.get("LAPLACE_TORCH_PYTHON"), help="LAPLACE_TORCH_PYTHON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="keep the result in this file, and leave the document alone")
    options = parser.parse_args()
    if options.python is None:
        parser.error("no python with laplace-torch: give --python, or set LAPLACE_TORCH_PYTHON")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    record = measure(options.python, options.rounds, options.threads)
    where = options.output or RESULTS / "laplace_torch.json"
    where.write_text(json.dumps(record, indent=1) + "\n")
    if options.output is None:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "laplace-torch", render(record)))
    print(render(record))


if __name__ == "__main__":
    main()
