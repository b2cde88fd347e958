"""Methods without a learning rate against the exact posteriors of ``gold_chains`` and ``gold_lora``.

    python -m scripts.reproduce.golds                  # runs missing in docs/results/golds.json
    python -m scripts.reproduce.golds sections12       # only on these targets
    python -m scripts.reproduce.golds lora -- MAP "deep ensemble"           # and only these rows

Every method has its own settings, and a budget in passes of one chain over the data. All runs are kept, and a later
call makes only missing ones. Targets without a gold are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from hf_bayes import (
    BAOABConfig,
    EnsembleConfig,
    LaplaceConfig,
    MAPConfig,
    MeanFieldConfig,
    SGHMCConfig,
    SGLDConfig,
    SGNHTConfig,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.laplace.supported import MAX_FULL
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig
from scripts.reproduce.gold_chains import GOLDS, load
from scripts.reproduce.gold_lora import lora_target
from scripts.reproduce.gold_runs import AnyTarget, Row, least_variation, measured
from scripts.reproduce.gold_targets import RECIPES, target
from scripts.reproduce.report import RESULTS, keep, table

NAME = "golds"
NUM_CHAINS = 32
CONTROL_VARIATE = 1.75
"""Gradients of an update, on average, where three quarters of the updates take two."""
APART = "independent chains"
"""The rows without mirrored pairs of chains."""
FULL = "Laplace, full"
"""The start of the names of rows that are left out for targets with too many parameters."""
LORA_CHAINS = 16
LORA_EPOCHS = 20
"""Passes of a chain on the LoRA target."""


def sampler(kind: type[LangevinConfig], passes: float, **settings: Any) -> Row:
    """Return the row of a sampler with nothing set but the number of members, unless ``settings`` says otherwise."""

    def config(draws: int) -> MethodConfig:
        return kind(num_chains=NUM_CHAINS, draws_per_chain=draws, **settings)

    return Row(config, passes, 0.3, CONTROL_VARIATE)


def laplace(structure: str, passes: float = 30, *, num_samples: int | None = 1, **batch: int) -> Row:
    """Return the row of a Laplace approximation."""
    return Row(lambda draws: LaplaceConfig(num_chains=1, structure=structure, num_samples=num_samples), passes, **batch)


ROWS = {
    "MAP": Row(lambda draws: MAPConfig(num_chains=1), 30),
    "deep ensemble": Row(lambda draws: EnsembleConfig(num_chains=NUM_CHAINS), 1000),
    "mean-field VI": Row(lambda draws: MeanFieldConfig(num_chains=1, num_draws=1), 100),
    "Laplace, diagonal": laplace("diagonal"),
    "Laplace, low rank": laplace("low_rank"),
    "Laplace, K-FAC": laplace("kronecker"),
    "Laplace, K-FAC, all labels": laplace("kronecker", num_samples=None),
    "Laplace, corrected K-FAC": laplace("kronecker_corrected"),
    FULL: laplace("full"),
    "SGLD, 1000 passes": sampler(SGLDConfig, 1000),
    "BAOAB, 1000 passes": sampler(BAOABConfig, 1000),
    "SGNHT, 1000 passes": sampler(SGNHTConfig, 1000),
    **{f"SGHMC, {passes} passes, {APART}": sampler(SGHMCConfig, passes, mirrored=False) for passes in (250, 500, 1000)},
}


def within(passes: float, **settings: Any) -> Row:
    """Return the row of SGHMC with a budget that holds everything, fewer chains and twice the draws of a chain."""
    return Row(
        lambda draws: SGHMCConfig(num_chains=NUM_CHAINS // 2, draws_per_chain=draws, **settings),
        passes, 0.15, CONTROL_VARIATE, beside=2,
    )  # fmt: skip


ROWS |= {
    "SGHMC, 16 chains, 1000 passes in all": within(990),  # the range test takes some, too
    f"SGHMC, 16 chains, 1000 passes in all, {APART}": within(990, mirrored=False),
    f"SGHMC, 16 chains, 1000 passes in all, heating 0.2, {APART}": within(990, heating=0.2, mirrored=False),
}

LORA_BATCH = 16


def lora_sampler(epochs: int, **settings: Any) -> Row:
    """Return the row of SGHMC on the LoRA, with so many passes of a chain."""
    return Row(
        lambda draws: SGHMCConfig(num_chains=LORA_CHAINS, draws_per_chain=draws, **settings),
        LORA_CHAINS * epochs,
        0.3,
        batch=LORA_BATCH,
    )


LORA_ROWS = {
    "MAP": Row(lambda draws: MAPConfig(num_chains=1), LORA_EPOCHS, batch=LORA_BATCH),
    "deep ensemble": Row(
        lambda draws: EnsembleConfig(num_chains=LORA_CHAINS), LORA_CHAINS * LORA_EPOCHS, batch=LORA_BATCH
    ),
    "mean-field VI": Row(lambda draws: MeanFieldConfig(num_chains=1, num_draws=1), 100, batch=LORA_BATCH),
    **{
        f"Laplace, {name}": laplace(structure, LORA_EPOCHS, batch=LORA_BATCH)
        for name, structure in {"diagonal": "diagonal", "K-FAC": "kronecker", "full": "full"}.items()
    },
    **{
        f"SGHMC, {epochs} epochs, {APART}": lora_sampler(epochs, mirrored=False)
        for epochs in (LORA_EPOCHS, 5 * LORA_EPOCHS)
    },
    "SGHMC, 20 epochs": lora_sampler(LORA_EPOCHS),
    "SGHMC, 20 epochs, heating 0.3": lora_sampler(LORA_EPOCHS, heating=0.3),
    "SGHMC, 20 epochs, heating 0.03": lora_sampler(LORA_EPOCHS, heating=0.03),
}


def rows_of(name: str) -> tuple[AnyTarget, Mapping[str, Row]]:
    """Return a target by name, and the rows of its table."""
    return (lora_target(), LORA_ROWS) if name == "lora" else (target(name), ROWS)


def experiment(names: Sequence[str], labels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record after the missing runs on these targets, by default on all that have a gold.

    Args:
        labels: rows of the table; all by default.
    """
    path = RESULTS / f"{NAME}.json"
    record = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "golds": {}, "runs": {}}
    for name in names or [name for name in (*RECIPES, "lora") if (GOLDS / f"{name}.safetensors").exists()]:
        (rows, table_rows), gold = rows_of(name), load(name)
        if gold.about["rows"] != rows.digest():
            raise ValueError(f"{name}: the texts here are others than those of its gold: make it again")
        classes = gold.probs.shape[1]
        about = dict(sorted(gold.about.items())) | {"n": rows.num_rows, "classes": classes}
        record["golds"][name] = about | {"tv_gold": round(least_variation(gold), 5)}
        runs = record["runs"].setdefault(name, {})
        for label, row in table_rows.items():
            if label.startswith(FULL) and int(about["parameters"]) > MAX_FULL:
                continue
            if label not in runs and (not labels or label in labels):
                run = measured(rows, gold, row)
                runs[label] = run | {"least_tv": round(least_variation(gold, run["members"]), 5)}
                record["seconds"] = round(record["seconds"] + run["seconds"])
                path.write_text(json.dumps(record, indent=1) + "\n")
                print(name, label, runs[label], flush=True)
    return {key: record[key] for key in ("seconds", "golds", "runs")}


POINTS = ("MAP", "deep ensemble")
"""Methods without draws of a posterior."""


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    golds = [
        [
            name,
            of["classes"],
            of["n"],
            of["parameters"],
            of["rhat"],
            of["ess_min"],
            of["ess_median"],
            f"{of['tv_gold']:.4f}",
        ]
        for name, of in record["golds"].items()
    ]
    every = [(name, label, run) for name, found in record["runs"].items() for label, run in found.items()]
    last_layers = [
        [name, label, f"{run['tv']:.4f}", _least(label, run), f"{run['eu']:.3f}", run["passes"], run["members"],
         f"{run['seconds']:.0f}"]
        for name, label, run in every if name != "lora"
    ]  # fmt: skip
    lora = [
        [label, f"{run['tv']:.4f}", _least(label, run), f"{run['eu']:.3f}", run.get("rhat", "-"),
         f"{run['passes'] / run['chains']:.1f}", run["chains"], run["members"], f"{run['seconds']:.0f}"]
        for name, label, run in every if name == "lora"
    ]  # fmt: skip
    parts = ("trial_slope", "trial_at_start", "trial_at_draw", "trial_beside", "trial_fits", "trial_anchored")
    trials = [
        [name, label, *(f"{run[part]:.3g}" for part in parts), run.get("relaxation", "-")]
        for name, label, run in every
        if parts[0] in run
    ]
    columns = ["gold", "method", "slope", "V_0", "V_1", "V_d", "start at a draw", "have a control variate"]
    shared = ["TV", "least TV", "EU / gold"]
    about = ["gold", "classes", "rows", "parameters", "R-hat", "ESS, least", "ESS, median", "error (TV)"]
    found = {
        "golds": table(about, golds),
        "runs": table(["gold", "method", *shared, "passes", "members", "CPU seconds"], last_layers),
        "trials": table([*columns, "relaxation"], trials),
    }
    if lora:
        found["lora"] = table(["method", *shared, "R-hat", "epochs", "chains", "members", "CPU seconds"], lora)
    return found


def _least(label: str, run: Mapping[str, Any]) -> str:
    return "-" if label in POINTS else f"{run['least_tv']:.4f}"


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    given = [*sys.argv[1:], "--"]
    names, labels = given[: given.index("--")], given[given.index("--") + 1 : -1]
    keep(NAME, lambda: experiment(names, labels))


if __name__ == "__main__":
    main()
