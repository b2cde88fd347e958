"""The quality and cost of every method of the package on one pretrained encoder with real labelled text.

    python -m scripts.reproduce.encoder_table                  # runs missing in docs/results/encoder_table.json
    python -m scripts.reproduce.encoder_table map snapshot     # only these methods

The task is to predict the Debian section of a package from its one-line description. Eight sections are learnt, eight
more are out of distribution (``debian_sections``). Every method has a grid. The validation NLL of one seed chooses a
point, and this point runs with all seeds on the test rows. Every finished run is kept. A later call makes only missing
runs: of a method that is added to ``encoder_table_methods``, of a method with changed settings, and runs that were kept
without diagnostics.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from scripts.reproduce.accounts import accounts_table
from scripts.reproduce.debian_sections import KNOWN, UNKNOWN, Row, fingerprint, index, rows_of, splits
from scripts.reproduce.encoder_table_bench import Bench, encoder
from scripts.reproduce.encoder_table_methods import Choice, Scale, methods, num_gradients
from scripts.reproduce.encoder_table_record import DIVERGED, Record, best, fill
from scripts.reproduce.report import RESULTS, keep, spread, table

NAME = "encoder_table"


def experiment(names: Sequence[str], scale: Scale, parts: Mapping[str, Sequence[Row]], path: Path) -> dict[str, Any]:
    """Return the record after the missing runs of these methods, by default of all methods."""
    about = {"scale": scale._asdict(), "sha256": fingerprint(parts), "known": KNOWN, "unknown": UNKNOWN}
    record = Record(path, json.loads(json.dumps(about)))
    table_of = methods(scale)
    unknown = set(names) - set(table_of)
    if unknown:
        raise ValueError(f"no method {', '.join(sorted(unknown))}: there are {', '.join(table_of)}")
    fill(record, Bench(scale, parts, encoder()), {name: table_of[name] for name in names or table_of})
    return record.content


def results(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return row -> numbers at the grid's best point, one dictionary per seed, in the order of the table."""
    scale = Scale(**record["about"]["scale"])
    found = {}
    for method in methods(scale).values():
        for row in method.readings:
            kept = record["rows"].get(row)
            if kept is not None and kept["cells"]:
                choice = best(kept, method)
                cells = [numbers for at, _, numbers in kept["cells"] if at == choice]
                if len(cells) == scale.seeds:
                    found[row] = cells
    return found


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    found = results(record)
    quality = [
        [row, *(_spread(cells, name) for name in ("accuracy", "nll", "ece", "brier", "total_auroc", "epistemic_auroc"))]
        for row, cells in found.items()
    ]
    entropies = [
        [
            row,
            *(_spread(cells, name) for name in ("total", "total_ood", "epistemic", "epistemic_ood")),
            spread([cell["total"] - cell["nll"] for cell in cells]),
        ]
        for row, cells in found.items()
    ]
    scale = Scale(**record["about"]["scale"])
    gradients = {row: num_gradients(scale, method) for method in methods(scale).values() for row in method.readings}
    cost = []
    for row, cells in found.items():
        points = _map_on_the_same_machine(record, cells)
        ratios = [
            [c[name] / p[name] for c, p in zip(cells, points, strict=False)] for name in ("training", "inference")
        ]
        members, on = cells[0]["members"] or "-", cells[0]["processor"]
        times = [spread(ratio, 1) if ratio else "-" for ratio in ratios]
        cost.append([row, members, f"{gradients[row] / gradients['MAP']:.3g}", *times, on])
    chosen = []
    for row in found:
        grid = record["rows"][row]["grid"]
        scores = sorted((nll, _words(choice)) for choice, nll in grid if nll != DIVERGED)
        chosen.append(
            [row, scores[0][1], f"{scores[0][0]:.3f}", f"{scores[-1][0]:.3f}", len(grid), len(grid) - len(scores)]
        )
    return {
        "quality": table(["method", "accuracy", "NLL", "ECE", "Brier", "OOD AUROC, TU", "OOD AUROC, EU"], quality),
        "entropies": table(["method", "TU, test", "TU, OOD", "EU, test", "EU, OOD", "TU - NLL, test"], entropies),
        "cost": table(
            ["method", "members", "gradients / MAP's", "training time / MAP's", "inference time / MAP's", "on"], cost
        ),
        "diagnostics": accounts_table(
            {
                row: [cell["diagnostics"] for cell in cells]
                for row, cells in found.items()
                if all("diagnostics" in cell for cell in cells)
            }
        ),
        "chosen": table(
            ["method", "chosen", "its validation NLL", "the worst of the grid", "points", "diverged"], chosen
        ),
        "paired": table(["method", "NLL less than MAP's", "seeds that gain"], _paired(found)),
    }


def _map_on_the_same_machine(record: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the MAP estimate's numbers for each seed on the processor of ``cells``, or [] without such a run."""
    kept = record["rows"]["MAP"]
    runs = {(numbers["processor"], seed): numbers for _, seed, numbers in [*kept.get("before", []), *kept["cells"]]}
    found = [runs.get((cell["processor"], seed)) for seed, cell in enumerate(cells)]
    return [one for one in found if one is not None] if all(found) else []


def _paired(found: Mapping[str, list[dict[str, Any]]]) -> list[list[Any]]:
    """Return the differences of NLL to the MAP estimate of the same seed, with their standard error over seeds."""
    rows = []
    for row, cells in found.items():
        gains = [point["nll"] - cell["nll"] for cell, point in zip(cells, found["MAP"], strict=True)]
        if row != "MAP":
            error = statistics.stdev(gains) / math.sqrt(len(gains))
            difference = f"{statistics.fmean(gains):.3f} ± {error:.3f}"
            rows.append([row, difference, f"{sum(gain > 0 for gain in gains)} of {len(gains)}"])
    return rows


def _words(choice: Choice) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in choice.items())


def _spread(cells: Sequence[Mapping[str, Any]], name: str) -> str:
    return spread([cell[name] for cell in cells]) if name in cells[0] else "-"


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw NLL, and AUROC of total and epistemic uncertainty, by method, with a point for each seed."""
    import matplotlib.pyplot as plt

    found = results(record)
    labels = list(found)
    panels = (
        ("test NLL in nats: lower is better", {"nll": ("black", "NLL")}),
        (
            "AUROC, unknown against known sections: higher is better",
            {"total_auroc": ("tab:blue", "by total uncertainty"), "epistemic_auroc": ("tab:orange", "by epistemic")},
        ),
    )
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 0.32 * len(labels) + 1.4), layout="constrained")
    for axis, (title, parts) in zip(axes, panels, strict=True):
        for name, (color, label) in parts.items():
            if name in found["MAP"][0]:
                mean = statistics.fmean(cell[name] for cell in found["MAP"])
                axis.axvline(mean, color=color, linewidth=0.8, linestyle=":")
            dots = [(cell[name], y) for y, row in enumerate(labels) for cell in found[row] if name in cell]
            axis.scatter(*zip(*dots, strict=True), color=color, s=18, alpha=0.7, label=label)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    figure.suptitle("A point is a seed; dotted: mean of the MAP estimate", fontsize=9)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # CPU seconds of one thread are the wall time of an idle machine
    scale = Scale()
    parts = splits(rows_of(index()), scale.rows)
    keep(NAME, lambda: experiment(sys.argv[1:], scale, parts, RESULTS / f"{NAME}.json"))


if __name__ == "__main__":
    main()
