"""The tables and the figure of evaluate_uncertainty.py.

This module is not a command: ``python scripts/evaluate_uncertainty.py`` calls it.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's colour-blind safe palette
LINES = ("-", "--", ":", "-.")
FILLED = 3  # more overlapping areas cannot be told apart


def look(number: int) -> dict:
    """Return the style of the histogram of a text: areas for the first texts, outlines for all further ones."""
    turn, place = divmod(number, len(COLOURS))
    if number < FILLED:
        return {"color": COLOURS[place], "alpha": 0.65}
    return {"color": COLOURS[place], "histtype": "step", "linestyle": LINES[turn % len(LINES)], "linewidth": 1.5}


def plot(found: dict[str, dict], results: dict, directory: Path) -> None:
    """Draw histograms of window scores, and the reliability diagram of the test text."""
    height = 3.4 + 0.2 * -(-len(found) // 2)  # room for the legend, which would hide bars inside
    figure, axes = plt.subplots(1, 3, figsize=(12, height), layout="constrained")
    for axis, measure in zip(axes, ("total", "epistemic"), strict=False):
        scores = {name: values[measure].mean(1) for name, values in found.items()}
        edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), 30)
        for number, (name, values) in enumerate(scores.items()):
            area = results["auroc"].get(name, {}).get(measure)
            label = name if area is None else f"{name} (AUROC {area:.3f})"
            axis.hist(values, edges, density=True, label=label, **look(number))
        axis.set(xlabel=f"mean {measure} uncertainty of a window (nats)", ylabel="density")
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    test = found["test"]
    bins = np.clip((test["confidence"].ravel() * 15).astype(int), 0, 14)
    count = np.bincount(bins, minlength=15)
    used = count > 0
    confidence = np.bincount(bins, test["confidence"].ravel(), 15)[used] / count[used]
    accuracy = np.bincount(bins, test["correct"].ravel(), 15)[used] / count[used]
    axes[2].plot([0, 1], [0, 1], color="0.6", lw=1)
    axes[2].plot(confidence, accuracy, "o-", color=COLOURS[0], ms=4)
    axes[2].set(
        xlabel="confidence", ylabel="accuracy", title=f"test text, ECE {results['ece']:.4f}", xlim=(0, 1), ylim=(0, 1)
    )
    figure.savefig(directory / "uncertainty.png", dpi=150)


def show(results: dict, posterior: str, console: Console) -> None:
    """Print a table of the test text, and a table with a row for each other text."""
    table = Table(title=Text(f"{posterior}: {results['members']} members"))
    for column in ("NLL", "member NLL", "accuracy", "ECE"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{results[key]:.4f}" for key in ("nll", "member_nll", "accuracy", "ece")))
    console.print(table)
    if not results["auroc"]:
        return
    table = Table(title="Telling other text from it")
    table.add_column("text", overflow="fold")
    for column in ("AUROC TU", "AUROC EU"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, areas in results["auroc"].items():
        cells = ["-" if m not in areas else f"{areas[m]:.4f}" for m in ("total", "epistemic")]
        table.add_row(Text(name), *cells)  # a name is not markup
    console.print(table)
