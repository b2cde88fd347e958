"""Minibatch Metropolis with and without the noise penalty on the double pendulum (penalty_bnn section 5).

    python -m scripts.reproduce.double_pendulum

A mixture-density network of 419 parameters predicts the positions of both masses 20 steps ahead. Five samplers on
the likelihood of 60 rows (and one on all 2992) are compared as in Table 1, each from the same trained networks.
Hamiltonian Monte Carlo on all rows explores the distributions of two of them further than random walks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_bayes.methods.averaging.map import MAPConfig
from scripts.reproduce.double_pendulum_contenders import CONTENDERS, PRIOR_STD, starts
from scripts.reproduce.double_pendulum_data import STEP, pendulum
from scripts.reproduce.double_pendulum_runs import Settings, run_size, run_stable, saved_and_loaded, scores, train
from scripts.reproduce.report import keep, legend_once, spread, table

NAME = "double_pendulum"
PLOTTED = ("tempered", "batched", "pseudo-SGLD", "penalty")
"""The panels of Figure 2, from top to bottom."""


def run(settings: Settings) -> dict[str, Any]:
    """Run every line and every size of batch, seed by seed."""
    rows = pendulum(settings.num_rows, settings.num_train)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in [*CONTENDERS, "trained networks"]}
    sizes: list[dict[str, Any]] = []
    stretch = slice(*settings.stretch)
    curves: dict[str, Any] = {"truth": _rounded(rows[1].y[stretch, 2])}
    for seed in range(settings.num_seeds):
        start = starts(settings.num_chains, seed)
        optimum = train(MAPConfig(prior_std=PRIOR_STD), start, rows[0], steps=settings.training, rate=1e-2, seed=seed)
        found["trained networks"].append(scores(saved_and_loaded(optimum), len(start), *rows))
        trained = optimum.run.theta.clone()
        for name, line in CONTENDERS.items():
            model, numbers = run_stable(line, trained if line.trained else start, rows, settings, seed)
            found[name].append(numbers)
            print(f"seed {seed}, {name}: {numbers}", flush=True)
            if seed == 0 and name in PLOTTED:
                shown = model(input_values=rows[1].x[stretch])
                curves[name] = {"mean": _rounded(shown.logits[:, 2]), "std": _rounded(shown.predictive_std[:, 2])}
        step = found["penalty"][0]["step_size"]
        for size in settings.sizes:
            sizes.append({"seed": seed, **run_size(trained, rows, settings, seed, size, step)})
    return {"settings": asdict(settings), "lines": found, "sizes": sizes, "curves": curves}


def _rounded(values: Tensor) -> list[float]:
    """Return values rounded to a millimetre, for figures."""
    return [round(value, 3) for value in values.tolist()]


LABELS = {
    "vanilla": ("vanilla", -4.11, -5.36, 7.1),
    "tempered": ("tempered", -1.96, -2.05, 3.9),
    "batched": ("batched", -1.68, -1.74, 1.7),
    "pseudo-SGLD": ("pseudo-SGLD", -2.35, -2.48, 4.8),
    "penalty": ("PBNN", -3.91, -4.83, 0.4),
}
"""The paper's lines: name there, NLL on test and training rows, average coverage error in percent."""


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables: Table 1 beside the paper's, further lines, diagnostics of chains, and Figure 3's numbers."""
    lines = record["lines"]

    def over_seeds(name: str, key: str, digits: int = 2, scale: float = 1.0) -> str:
        values = [scale * one[key] for one in lines[name] if key in one]
        return spread(values, digits) if values else "-"

    def line(name: str) -> list[str]:
        return [over_seeds(name, "test"), over_seeds(name, "train"), over_seeds(name, "ace", 1, 100)]

    def chain(name: str) -> list[str]:
        return [
            name, over_seeds(name, "acceptance"), over_seeds(name, "step_size", 5), over_seeds(name, "penalty"),
            over_seeds(name, "beyond_series"), over_seeds(name, "first"), over_seeds(name, "last"),
            over_seeds(name, "rhat", 1), over_seeds(name, "moved", 3), str(lines[name][0]["updates"]),
            over_seeds(name, "seconds", 0),
        ]  # fmt: skip

    papers = [[name, test, train, ace, *line(name)] for name, (_, test, train, ace) in LABELS.items()]
    sampled = [name for name in lines if name != "trained networks"]
    sizes: dict[int, list[Mapping[str, Any]]] = {}
    for point in record["sizes"]:
        sizes.setdefault(point["size"], []).append(point)
    keys = (("test", 2), ("coverage", 3), ("acceptance", 4), ("penalty", 3), ("beyond_series", 3))
    figure = [
        [size, points[0]["count"], *(spread([one[key] for one in points], digits) for key, digits in keys)]
        for size, points in sizes.items()
    ]
    ours = ["test NLL", "train NLL", "ACE %"]
    theirs = [f"paper: {column}" for column in ours]
    return {
        "table": table(["", *theirs, *ours], papers),
        "others": table(["", *ours], [[name, *line(name)] for name in lines if name not in LABELS]),
        "chains": table(
            [
                "",
                "acceptance",
                "step",
                "penalty",
                "beyond the series",
                "first draws",
                "last draws",
                "R-hat",
                "moved",
                "updates",
                "CPU s",
            ],
            [chain(name) for name in sampled],
        ),
        "sizes": table(["n", "K", "test NLL", "coverage", "acceptance", "penalty", "beyond the series"], figure),
    }


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw Figure 2 (predictions over time), Figure 3 (by size of a batch), and the effect of the start."""
    import matplotlib

    matplotlib.use("Agg")
    _draw_predictions(record, directory)
    _draw_batch_sizes(record, directory)
    _draw_starts(record, directory)


def _draw_predictions(record: Mapping[str, Any], directory: Path) -> None:
    import matplotlib.pyplot as plt

    curves, truth = record["curves"], np.array(record["curves"]["truth"])
    time_axis = STEP * np.arange(len(truth))
    figure, axes = plt.subplots(len(PLOTTED), 1, figsize=(9, 8), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes, PLOTTED, strict=True):
        mean, std = np.array(curves[name]["mean"]), np.array(curves[name]["std"])
        axis.fill_between(time_axis, mean - std, mean + std, color="0.8", label="mean ± one standard deviation")
        axis.plot(time_axis, mean, color="#EE6677", label="predictive mean")
        axis.plot(time_axis, truth, color="#4477AA", label="simulation")
        inside = 100 * float((np.abs(truth - mean) <= std).mean())
        axis.set_title(f"{name}: {inside:.0f} % inside", fontsize=10)
        axis.set_ylabel("x of mass 2 (m)")
    axes[0].set_ylim(-3.2, 3.2)
    axes[0].legend(frameon=False, ncols=3, fontsize=8, loc="upper left")
    axes[-1].set_xlabel("time within the test rows (s); predicted 0.2 s before")
    figure.savefig(directory / f"{NAME}_predictions.png", dpi=130)
    plt.close(figure)


def _draw_batch_sizes(record: Mapping[str, Any], directory: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    sizes = sorted({point["size"] for point in record["sizes"]})
    for axis, (key, label) in zip(
        panels, (("test", "test NLL (nats per row)"), ("acceptance", "acceptance"), ("coverage", "one-sigma coverage")),
        strict=True,
    ):  # fmt: skip
        for seed in sorted({point["seed"] for point in record["sizes"]}):
            values = [point[key] for point in record["sizes"] if point["seed"] == seed]
            axis.plot(sizes, values, "o-", color="#4477AA", alpha=0.6)
        axis.set(xlabel="rows of a batch, n", ylabel=label, xscale="log")
        axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axis.minorticks_off()
    panels[1].set_yscale("log")
    panels[1].set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    panels[1].minorticks_off()
    panels[1].set_title("penalty, one step size; a line is a seed", fontsize=10)
    panels[2].axhline(0.682, color="0.6", lw=1)
    panels[2].text(sizes[0], 0.685, "68.2 %", color="0.4", fontsize=8, va="bottom")
    figure.savefig(directory / f"{NAME}_batch_size.png", dpi=130)
    plt.close(figure)


def _draw_starts(record: Mapping[str, Any], directory: Path) -> None:
    import matplotlib.pyplot as plt

    shown = [name for name in record["lines"] if name != "trained networks"]
    figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
    for place, name in enumerate(reversed(shown)):
        for one in record["lines"][name]:
            axis.plot(one["test"], place, "o", color="#4477AA", alpha=0.7, label="here, a seed")
        if name in LABELS:
            axis.plot(LABELS[name][1], place, "D", color="#EE6677", label="paper")
    axis.set_yticks(range(len(shown)), reversed(shown))
    axis.set_xlabel("test NLL (nats per row; lower is better)")
    axis.set_title("Chains start at trained networks unless noted", fontsize=10)
    axis.grid(axis="y", color="0.9")
    legend_once(axis)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def main() -> None:
    """Run at full size and keep the record."""
    torch.set_num_threads(1)
    keep(NAME, lambda: run(Settings()))


if __name__ == "__main__":
    main()
