"""The held-out quality of a posterior by temperature, for any classifier or language model and any method.

    python -m scripts.reproduce.temperature_sweep --output_dir sweep          the page's run, which has no other flag
    python -m scripts.reproduce.temperature_sweep --output_dir sweep --model_name_or_path FOLDER --dataset train.jsonl \
        --test_file test.jsonl [--task causal_lm] [--batch_size 64] [--prior_std 0.1] [--num_train 500] [--depth 2]

By default the script runs the CNN-LSTM of cold_posteriors app. A.3 on descriptions of Debian packages. A cell is one
method at one temperature and seed. Each cell writes ``output_dir/cells/NAME.json`` and is not run again if it exists.

Methods: ``mle`` and ``map`` (AdamW; no temperature), ``laplace_ef`` and ``laplace_ggn`` (around that MAP; members and
linearised; for a language model with as many draws), ``mean_field``, ``sghmc_serial`` (one chain), ``sghmc_parallel``
(one draw from each of several chains) and ``phases`` (SGD, then SGHMC, then SGD again, section 5.3: the single model
after each). Methods that a model does not allow are left out, with a message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from transformers.utils import logging as transformers_logging

from hf_bayes.cli.parsing import parse_arguments
from scripts.reproduce.accounts import accounts_table
from scripts.reproduce.report import keep, spread, table
from scripts.reproduce.temperature_sweep_cells import run_cell
from scripts.reproduce.temperature_sweep_problem import METHODS, POINTS, Arguments, prepare, settings_key

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAME = "temperature_sweep"
METRICS = ("accuracy", "nll", "brier", "ece")


def sweep(args: Arguments) -> dict[str, Any]:
    """Run the missing cells and return the record of all cells."""
    unknown = sorted(set(args.methods) - set(METHODS))
    if unknown:
        raise ValueError(f"unknown methods {', '.join(unknown)}: the methods are {', '.join(METHODS)}")
    if args.evaluate_on not in ("test", "validation"):
        raise ValueError(f"evaluate_on must be test or validation, got {args.evaluate_on!r}")
    problem, cells = prepare(args), Path(args.output_dir) / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    record = []
    for seed, name in itertools.product(args.seeds, _ordered(args.methods)):
        heats = [None] if name in POINTS else args.phase_temperatures if name == "phases" else args.temperatures
        for temperature in heats:
            file = cells / f"{settings_key(args)}-{name}-{temperature}-{seed}.json"
            if not file.exists():
                start = time.perf_counter()
                found = run_cell(problem, name, temperature, seed)
                cell = {"method": name, "temperature": temperature, "seed": seed, **found}
                file.write_text(json.dumps({**cell, "seconds": round(time.perf_counter() - start, 1)}))
            record.append(json.loads(file.read_text()))
    for line, why in left_out(record):
        print(f"left out: {line}: {why}")
    data = hashlib.sha256(json.dumps(problem.train[:], sort_keys=True).encode()).hexdigest()[:12]
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k != "output_dir"}
    about = {"num_train": len(problem.train), "num_held_out": len(problem.held_out), "names": problem.names}
    about |= {"num_parameters": sum(p.numel() for p in problem.load().parameters()), "sha256_of_train": data}
    return {"settings": settings, "problem": about, "cells": record}


def left_out(cells: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the missing lines and the reasons, once for all temperatures and seeds."""
    return list(dict.fromkeys(found for cell in cells for found in cell.get("left_out", {}).items()))


def _ordered(methods: list[str]) -> list[str]:
    """Return the methods with MAP before the Laplace approximations, which need it."""
    wanted = set(methods) | ({"map"} if any(name.startswith("laplace") for name in methods) else set())
    return [name for name in METHODS if name in wanted]


def lines_of(record: dict[str, Any]) -> dict[str, dict[float | None, dict[str, list[float]]]]:
    """Return {line: {T: {metric: [one value per seed]}}}."""
    found: dict[str, dict[float | None, dict[str, list[float]]]] = {}
    for cell in record["cells"]:
        for line, metrics in cell["lines"].items():
            at = found.setdefault(line, {}).setdefault(cell["temperature"], {name: [] for name in METRICS})
            for name in METRICS:
                at[name].append(metrics[name])
    return found


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    lines, rows, best = lines_of(record), [], []
    for line, at in lines.items():
        for temperature, metrics in at.items():
            heat = "" if temperature is None else f"{temperature:g}"
            rows.append([line, heat, *(spread(metrics[name]) for name in METRICS)])
        heats = [heat for heat in at if heat is not None]
        if len(heats) > 1:
            least = {heat: float(np.mean(at[heat]["nll"])) for heat in heats}
            coldest = min(least, key=least.__getitem__)
            most = max(heats, key=lambda heat: float(np.mean(at[heat]["accuracy"])))
            hottest = max(heats)
            best.append([line, f"{coldest:g}", least[coldest], f"{hottest:g}", least[hottest], f"{most:g}"])
    seconds: dict[str, list[float]] = {}
    for cell in record["cells"]:
        seconds.setdefault(cell["method"], []).append(cell["seconds"])
    accounts: dict[str, list[dict[str, Any]]] = {}
    for cell in record["cells"]:
        if "diagnostics" in cell:
            accounts.setdefault(f"{cell['method']}, T = {cell['temperature']:g}", []).append(cell["diagnostics"])
    cost = table(["method", "seconds of a cell"], ([name, f"{np.mean(each):.0f}"] for name, each in seconds.items()))
    head = ["method", "T of the least NLL", "NLL there", "largest T", "NLL there", "T of the best accuracy"]
    return {
        "best": table(head, best),
        "sweep": table(["method", "T", "accuracy", "NLL", "Brier", "ECE"], rows),
        "diagnostics": accounts_table(accounts),
        "cost": cost,
    }


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw a panel for each metric, with a line over T and a band of one standard deviation for each method.

    Point estimates are horizontal lines.
    """
    lines = lines_of(record)
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    labels = {"accuracy": "accuracy (higher is better)", "nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE"}
    swept = [line for line in lines if len(lines[line]) > 1]
    for axis, metric in zip(axes.flat, METRICS, strict=True):
        for index, line in enumerate(swept):
            heats = sorted(heat for heat in lines[line] if heat is not None)
            values = np.array([lines[line][heat][metric] for heat in heats])
            mean, std = values.mean(1), values.std(1, ddof=min(1, values.shape[1] - 1))
            dashes = "--" if line.endswith("linearised") else "-"
            axis.plot(heats, mean, f"o{dashes}", color=f"C{index}", ms=4, label=line.replace("_", " "))
            axis.fill_between(heats, mean - std, mean + std, color=f"C{index}", alpha=0.15, lw=0)
        for line, dashes in zip(POINTS, (":", "-."), strict=True):
            if line in lines:
                axis.axhline(np.mean(lines[line][None][metric]), color="0.3", lw=1.2, ls=dashes, label=line.upper())
        axis.set(xscale="log", xlabel="temperature T", ylabel=labels[metric])
    low, high = axes[0, 1].get_ylim()
    if high > 5 * low > 0:  # members of wide Gaussians are worse than a uniform guess
        axes[0, 1].set_yscale("log")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def quiet() -> None:
    """Silence progress bars and logs, because a hundred runs would print too much."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(at temperature 0|1 member).*")


def main() -> None:
    """Make the page's run, or the record and figure of other settings in their own folder."""
    (args,) = parse_arguments(Arguments)
    quiet()
    if args == Arguments(args.output_dir):
        return keep(NAME, lambda: sweep(args))
    directory = Path(args.output_dir)
    record = sweep(args)
    (directory / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    figures(record, directory)
    print(blocks(record)["sweep"])
    return None


if __name__ == "__main__":
    main()
