"""How fast chains of SGHMC move on the LoRA with a gold, when they start at exact draws.

    python -m scripts.reproduce.gold_speed      # the runs that docs/results/gold_speed.json lacks

A chain that starts at a draw of the posterior needs neither a warm start nor burn-in: all its epochs are draws. So
R-hat above 1 comes from slow movement alone. Other runs have a warm start and 20 epochs in all, with several seeds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers.utils import logging

from hf_bayes import HMCConfig, SGHMCConfig
from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, rhat
from scripts.reproduce.gold_chains import Gold, load
from scripts.reproduce.gold_lora import NAME, Energy, LoraTarget, lora_target
from scripts.reproduce.gold_runs import Row, begin, distance, measured
from scripts.reproduce.golds import LORA_EPOCHS, lora_sampler
from scripts.reproduce.report import RESULTS, as_text, keep, spread, table

PAGE = "gold_speed"
SPEEDS: dict[str, dict[str, Any]] = {
    "heating 0.1": {"heating": 0.1},
    "heating 0.3": {"heating": 0.3},
    "heating 1": {"heating": 1.0},
}
SEEDED: dict[str, dict[str, Any]] = {"defaults": {}}
NUM_SEEDS = 8
CHAINS, BATCH = 16, 16
EPOCHS, DRAWS_PER_EPOCH = 40, 5
MOVES = 50
"""Moves of Hamiltonian Monte Carlo from draws of the prior: 1,600 gradients, where the worst logit of the gold needs
244 for an independent draw."""
SETTLING = 30
"""Updates before the first draw. In them, curvature and step size are measured."""
WINDOWS = (5, 10, 20, 40)
"""Epochs after which R-hat is computed from all draws so far."""


def exact_draws(rows: LoraTarget, *, num_chains: int = CHAINS, moves: int = MOVES) -> Tensor:
    """Return where chains of Hamiltonian Monte Carlo end, [M, d]."""
    energy = Energy.of(rows)
    start = torch.randn(num_chains, energy.logits.layout.dim, generator=generator("speed", NAME))
    method = HMCConfig(num_chains=num_chains, num_leapfrog=32)
    found = sample(energy, start, method, num_steps=moves, learning_rate=1e-3, burn_in=moves - 1)
    return found.draws[:, -1] * energy.prior.std


def speed(
    rows: LoraTarget, gold: Gold, start: Tensor, settings: Mapping[str, Any], *, epochs: int = EPOCHS
) -> dict[str, Any]:
    """Return the R-hat over time, the epochs of an independent draw and the EU of chains from ``start`` [M, d]."""
    chains, steps = len(start), epochs * rows.num_rows // BATCH + SETTLING
    config = SGHMCConfig(
        num_chains=chains, draws_per_chain=epochs * DRAWS_PER_EPOCH, mirrored=False, warm_start_steps=0,
        burn_in=SETTLING, **settings,
    )  # fmt: skip
    passes = chains * (steps + 0.5) * BATCH / rows.num_rows  # a half, because the number of updates is rounded down
    (run, _, _, _), batches = begin(rows, Row(lambda draws: config, passes, batch=BATCH), theta=start)
    found: dict[str, Tensor] = {}
    for _ in range(steps):
        found |= run.update(next(batches), 1.0).info
    logits = rows.member_logits(torch.stack(run.draws, 1).flatten(0, 1)).unflatten(0, (chains, -1))
    centred = (logits - logits.mean(-1, keepdim=True)).flatten(2)
    windows = [window for window in WINDOWS if window <= epochs]
    per_draw = epochs * chains / ess(centred)
    return {
        "epochs": windows,
        "rhat": [round(float(rhat(centred[:, : window * DRAWS_PER_EPOCH]).max()), 3) for window in windows],
        "epochs_per_draw": [round(float(value), 2) for value in (per_draw.median(), per_draw.max())],
        "relaxation": round(float(found["relaxation"].mean()) * BATCH / rows.num_rows, 2),
        **distance(logits.flatten(0, 1).double(), gold),
    }


def experiment(rows: LoraTarget, gold: Gold) -> dict[str, Any]:
    """Return the record after the missing runs."""
    path, clock = RESULTS / f"{PAGE}.json", time.perf_counter()
    record = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "speeds": {}, "seeds": {}}
    missing = [label for label in SPEEDS if label not in record["speeds"]]
    start = exact_draws(rows) if missing else torch.empty(0)
    for label in missing:
        record["speeds"][label] = speed(rows, gold, start, SPEEDS[label])
        print(label, record["speeds"][label], flush=True)
    for label, settings in SEEDED.items():
        if label not in record["seeds"]:
            row = lora_sampler(LORA_EPOCHS, **settings)
            runs = [measured(rows, gold, row, seed) for seed in range(NUM_SEEDS)]
            means = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in ("tv", "rhat")}
            record["seeds"][label] = {"eu": [run["eu"] for run in runs], **means}
            path.write_text(as_text(record))
    record["seconds"] += round(time.perf_counter() - clock)
    return {name: record[name] for name in ("seconds", "speeds", "seeds")}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    speeds = [
        [label, run["relaxation"], *run["epochs_per_draw"], *(run["rhat"][run["epochs"].index(at)] for at in (20, 40)),
         f"{run['eu']:.3f}"]
        for label, run in record["speeds"].items()
    ]  # fmt: skip
    seeds = [
        [label, spread(of["eu"]), min(of["eu"]), max(of["eu"]), f"{of['tv']:.4f}", f"{of['rhat']:.2f}",
         f"{sum(abs(eu - 1) <= 0.1 for eu in of['eu'])} of {len(of['eu'])}"]
        for label, of in record["seeds"].items()
    ]  # fmt: skip
    columns = [
        "chains",
        "relaxation",
        "epochs of a draw, median",
        "worst",
        "R-hat, 20 epochs",
        "40 epochs",
        "EU / gold",
    ]
    return {
        "speeds": table(columns, speeds),
        "seeds": table(["settings", "EU / gold", "least", "largest", "TV", "R-hat", "EU within 10 %"], seeds),
    }


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw R-hat against epochs, with a line for each setting."""
    canvas, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for label, run in record["speeds"].items():
        shown = f"{label}: EU / gold {run['eu']:.2f}"
        axis.plot(run["epochs"], [value - 1 for value in run["rhat"]], "o-", ms=4, label=shown)
    axis.axhline(0.05, color="0.3", lw=1, ls=":", label="R-hat 1.05")
    axis.set(
        xscale="log", yscale="log", xlabel="epochs after a start at exact draws", ylabel="R-hat of the worst logit - 1"
    )
    axis.set_xticks(WINDOWS, map(str, WINDOWS))
    axis.minorticks_off()
    axis.set_ylim(bottom=0.03)
    axis.legend(frameon=False, loc=(0.02, 0.17))
    canvas.savefig(directory / f"{PAGE}.png", dpi=130)
    plt.close(canvas)


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep(PAGE, lambda: experiment(lora_target(), load(NAME)))


if __name__ == "__main__":
    main()
