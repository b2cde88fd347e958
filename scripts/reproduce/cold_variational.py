"""Variational inference at lower temperatures: what it minimises, and how well it predicts.

    python -m scripts.reproduce.cold_variational --data DATA   # the runs that the page lacks

The task is that of "Debian sections, LoRA in the last layer" in recommend.md, with one chain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_bayes import IVONConfig, MAPConfig, MeanFieldConfig
from hf_bayes.core.config import MethodConfig
from hf_bayes.training.tuning.candidates import Candidate
from scripts.reproduce.recommend import Bench
from scripts.reproduce.recommend_tasks import LAST, debian
from scripts.reproduce.report import as_text, continued, spread, table

NAME = "cold_variational"
MEMBERS = 10
"""Members of a prediction."""


class Setting(NamedTuple):
    """A row of the table: a method, and the gradients of its run."""

    name: str
    method: MethodConfig
    gradients: int


def settings() -> tuple[Setting, ...]:
    """Return the rows. num_draws=1: an update of mean_field has one gradient, as in recommend.md."""
    ivon = (
        Setting(f"IVON, T = {t:g}", IVONConfig(temperature=t), gradients)
        for t, gradients in ((1.0, 300), (1.0, 1200), (0.1, 300), (0.03, 300), (0.01, 300), (0.003, 300))
    )
    field_of = (
        Setting(f"mean field, T = {t:g}", MeanFieldConfig(num_draws=1, temperature=t), gradients)
        for t, gradients in ((1.0, 300), (1.0, 1200), (0.01, 300))
    )
    return Setting("plain fine-tuning", MAPConfig(), 300), *field_of, *ivon


@dataclass
class Arguments:
    """The part of the table to make."""

    data: str = field(metadata={"help": "Folder with tinyshakespeare/input.txt."})
    seeds: int = field(default=2, metadata={"help": "Number of seeds."})


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing runs."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    done = {(run["name"], run["gradients"], run["seed"]) for run in record["runs"]}
    bench = Bench(debian(Path(args.data), LAST))
    for seed in range(args.seeds):
        for name, method, gradients in settings():
            if (name, gradients, seed) in done:
                continue
            found = bench.run(Candidate(name, method, None, MEMBERS), seed, gradients)
            kept = {key: found[key] for key in ("nll", "accuracy", "temperature", "seconds")}
            kept |= {key: found[key] for key in ("free_energy", "epistemic") if key in found}
            record["runs"].append({"name": name, "gradients": gradients, "seed": seed, **kept})
            path.write_text(as_text(record))
            print(record["runs"][-1], flush=True)
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the table, in the order of the settings."""
    cells: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in record["runs"]:
        cells.setdefault((run["name"], run["gradients"]), []).append(run)
    columns = ["method", "gradients", "free energy, nats", "accuracy", "NLL", "t", "EU, nats", "seeds"]
    return {
        NAME: table(
            columns,
            [
                [
                    name, gradients, _spread(runs, "free_energy", 0), _spread(runs, "accuracy"), _spread(runs, "nll"),
                    _spread(runs, "temperature", 2), _spread(runs, "epistemic"), len(runs),
                ]
                for (name, gradients), runs in cells.items()
            ],
        )
    }  # fmt: skip


def _spread(runs: list[Mapping[str, Any]], name: str, digits: int = 3) -> str:
    values = [run[name] for run in runs if name in run]
    return spread(values, digits) if values else "-"


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
