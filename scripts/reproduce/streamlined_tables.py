"""Sampling, the linearised model and a single pass on MLPs (streamlined prediction, Tables 1, 2, 4, 6, Figs 1, 3, 4).

    python -m scripts.reproduce.streamlined_tables
    python -m scripts.reproduce.streamlined_tables --csv concrete.csv airfoil.csv --images mnist.npz

scikit-learn's data stand in for UCI and MNIST. The originals are read where a path is given: a CSV file without a
header, with the label in the last column, or an NPZ file with x_train, y_train, x_test and y_test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.ndimage import rotate
from sklearn import datasets
from torch import Tensor

from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.metrics.functions import expected_calibration_error, ood_auroc
from hf_bayes.uncertainty.gaussian_links import log_density
from scripts.reproduce import streamlined_models as models
from scripts.reproduce.report import keep, spread, table
from scripts.reproduce.streamlined_models import Outputs, Task

NAME = "streamlined_tables"
PRIOR_STD, NOISE_STD = 1.0, 0.5
ANGLES = tuple(range(0, 181, 30))
KINDS = {"full": "Laplace, full", "kronecker": "Laplace, K-FAC", "diagonal": "Laplace, diagonal"}
BINS = np.linspace(0, 1, 21)


@dataclass
class Arguments:
    """The data and the sizes of the run. ``max_rows`` limits the data of scikit-learn alone."""

    seeds: int = 3
    steps: int = 400
    mean_field_steps: int = 600
    members: int = 50
    regressions: tuple[str, ...] = ("diabetes", "friedman1", "friedman2")
    classifications: tuple[str, ...] = ("digits", "breast_cancer", "wine")
    csv: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    ood_rows: int = 800
    grid: int = 30
    factor_rows: int = 150
    max_rows: int = 800


class Answer(NamedTuple):
    """A prediction: numbers [B] or log-probabilities [B, C], and the NLPD [B] as a function of labels."""

    prediction: Tensor
    nlpd: Callable[[Tensor], Tensor]


Way = Callable[[Tensor], Answer]


def regression_data(name: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and numbers of a data set of scikit-learn, or of a CSV file."""
    if name.endswith(".csv"):
        rows = np.loadtxt(name, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
    else:
        noise = {"friedman1": 1.0, "friedman2": 100.0, "friedman3": 0.1}[name]
        x, y = getattr(datasets, f"make_{name}")(n_samples=500, noise=noise, random_state=0)
    return x[:limit], y[:limit]


def classification_data(name: str, limit: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return inputs, classes, and the number of training rows (0: four fifths, drawn anew for each seed)."""
    if name.endswith(".npz"):
        file = np.load(name)
        parts = [(file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test")]
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return x.reshape(len(x), -1) / 255.0, y, len(parts[0][0])
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return (x / 16 if name == "digits" else x)[:limit], y[:limit], 0


def task_of(x: np.ndarray, y: np.ndarray, seed: int, widths: tuple[int, ...], num_train: int = 0) -> Task:
    """Return a split with standardised inputs (images: centred), and with standardised numbers."""
    order = np.arange(len(x)) if num_train else np.random.default_rng(seed).permutation(len(x))
    inside, outside = np.split(order, [num_train or len(x) * 4 // 5])
    image = x.shape[1] >= 64
    mean, scale = x[inside].mean(0), 0.5 if image else x[inside].std(0) + 1e-9
    regression = widths[-1] == 1
    if regression:
        y = (y - y[inside].mean()) / y[inside].std()
    labels = torch.from_numpy(np.asarray(y, float if regression else int))
    inputs = torch.from_numpy((x - mean) / scale)
    return Task(inputs[inside], labels[inside], inputs[outside], labels[outside], widths)


def ways(task: Task, structures: tuple[str, ...], seed: int, args: Arguments) -> dict[str, Way]:
    """Train a network and return {row: how it predicts}."""
    model = models.mlp(task.widths, seed=seed)
    sizes = {"noise_std": NOISE_STD, "prior_std": PRIOR_STD}
    start = models.map_estimate(model, task, steps=args.steps, **sizes)
    posteriors = {KINDS[kind]: models.laplace(model, task, kind, PRIOR_STD, NOISE_STD) for kind in structures}
    first = next(iter(posteriors.values()))
    noise = float(first.config.head["noise_std"]) if task.regression else None
    sizes["noise_std"] = noise or NOISE_STD
    gaussian = models.mean_field(task, start, steps=args.mean_field_steps, seed=seed, **sizes)
    posteriors["mean-field VI"] = models.with_gaussian(first, gaussian)

    def plain(x: Tensor) -> Outputs:
        mean = models.logits_of(start, x, task.widths)[0]
        return Outputs(mean, torch.zeros(*mean.shape, mean.shape[-1], dtype=mean.dtype))

    found: dict[str, Way] = {"MAP": _gaussian(plain, noise)}
    for name, posterior in posteriors.items():
        found[f"{name}: sampling"] = _sampling(posterior.approximation, task, noise, args.members, seed)
        for title, function in (("GLM", models.glm), ("single pass", models.single_pass)):
            outputs = cache(lambda x, function=function, posterior=posterior: function(model, posterior, x))
            some = task.x[: args.factor_rows]
            factor = models.best_factor(outputs(some), task.y[: args.factor_rows], noise)
            found[f"{name}: {title}"] = _gaussian(outputs, noise)
            found[f"{name}: {title}, scaled"] = _gaussian(outputs, noise, factor)
    return found


def _gaussian(outputs: Callable[[Tensor], Outputs], noise: float | None, factor: float = 1.0) -> Way:
    def way(x: Tensor) -> Answer:
        found = outputs(x)
        prediction = models.log_probs_of(found, factor) if noise is None else found.mean[:, 0]
        return Answer(prediction, lambda y: models.nlpd(found, y, noise, factor))

    return way


def _sampling(gaussian: Any, task: Task, noise: float | None, number: int, seed: int) -> Way:
    def way(x: Tensor) -> Answer:
        outputs = models.members(gaussian, x, task.widths, number, seed)
        if noise is not None:
            spreads = torch.zeros_like(outputs)
            return Answer(
                outputs.mean(0)[:, 0], lambda y: -log_density(y[:, None], outputs, spreads, noise).reshape(len(y))
            )
        log_probs = models.log_probs_of_members(outputs)
        return Answer(log_probs, lambda y: torch.nn.functional.nll_loss(log_probs, y, reduction="none"))

    return way


def scores(task: Task, way: Way) -> dict[str, float]:
    """Return the numbers of a row of the tables."""
    answer = way(task.test_x)
    found = {"nlpd": float(answer.nlpd(task.test_y).mean())}
    if task.regression:
        return {**found, "rmse": float((answer.prediction - task.test_y).square().mean().sqrt())}
    best = answer.prediction.max(-1)
    correct = (best.indices == task.test_y).double()
    ece = expected_calibration_error(best.values.exp().clamp(max=1).numpy(), correct.numpy())
    return {**found, "accuracy": float(correct.mean()), "ece": ece}


def rotated(task: Task, way: Way) -> list[float]:
    """Return the NLPD of test images that are rotated by each angle (Figures 3a and 4a)."""
    side = round(task.test_x.shape[1] ** 0.5)
    images = task.test_x.reshape(-1, side, side).numpy()
    turned = [rotate(images, angle, axes=(1, 2), reshape=False, order=1, cval=images.min()) for angle in ANGLES]
    return [float(way(torch.from_numpy(x).flatten(1)).nlpd(task.test_y).mean()) for x in turned]


def outside(args: Arguments, seed: int) -> dict[str, Any]:
    """Train on the digits 0 to 4, and return entropies on them and on the digits 5 to 9 (Figures 3b and 4b)."""
    x, y, _ = classification_data("digits", args.ood_rows)
    task = task_of(x[y < 5], y[y < 5], seed, (64, 64, 32, 5))
    others = torch.from_numpy((x[y >= 5] - x[y < 5].mean(0)) / 0.5)
    found = {}
    for name, way in ways(task, ("kronecker",), seed, args).items():
        values = []
        for inputs in (task.test_x, others):
            log_probs = way(inputs).prediction
            values.append((-(log_probs.exp() * log_probs).sum(-1) / np.log(5)).clamp(0, 1).numpy())
        labels = np.repeat([0, 1], [len(part) for part in values])
        histograms = [(np.histogram(part, BINS)[0] / len(part)).tolist() for part in values]
        found[name] = {"auroc": ood_auroc(np.concatenate(values), labels), "histograms": histograms}
    return found


def moons(args: Arguments) -> dict[str, Any]:
    """Return the probability of a class on a grid around two half moons (Figure 1)."""
    x, y = datasets.make_moons(100, noise=0.2, random_state=0)
    task = task_of(x, y, 0, (2, 16, 16, 2))
    ticks = torch.linspace(-4, 4, args.grid, dtype=torch.float64)
    points = torch.cartesian_prod(ticks, ticks)
    panels = {
        name: way(points).prediction[:, 1].exp().view(args.grid, -1).tolist()
        for name, way in ways(task, ("kronecker",), 0, args).items()
        if "scaled" not in name
    }
    return {"ticks": ticks.tolist(), "panels": panels, "x": task.x.tolist(), "y": task.y.tolist()}


def run(args: Arguments) -> dict[str, Any]:
    """Return the record of all tables and figures."""
    tables: dict[str, dict[str, Any]] = {"regressions": {}, "classifications": {}}
    turned: dict[str, list[list[float]]] = {}
    for table_name, name, seed, task in tasks(args):
        structures = ("full",) if task.regression else ("kronecker", "diagonal")
        about = {"rows": len(task.x) + len(task.test_x), "widths": list(task.widths), "cells": {}}
        cells = tables[table_name].setdefault(Path(name).stem, about)["cells"]
        for row, way in ways(task, structures, seed, args).items():
            cells.setdefault(row, []).append(scores(task, way))
            if name == "digits":
                turned.setdefault(row, []).append(rotated(task, way))
        print(name, seed, flush=True)
    away = [outside(args, seed) for seed in range(args.seeds)]
    print("outside", flush=True)
    return {"settings": asdict(args), **tables, "rotated": turned, "outside": away, "moons": moons(args)}


def tasks(args: Arguments) -> Iterator[tuple[str, str, int, Task]]:
    """Yield (table, data, seed, task)."""
    for seed in range(args.seeds):
        for name in (*args.regressions, *args.csv):
            x, y = regression_data(name, args.max_rows)
            yield "regressions", name, seed, task_of(x, y, seed, (x.shape[1], 50, 1))
        for name in (*args.classifications, *args.images):
            x, y, num_train = classification_data(name, args.max_rows)
            hidden = (128, 64) if name.endswith(".npz") else (64, 32) if name == "digits" else (32,)
            widths = (x.shape[1], *hidden, int(y.max()) + 1)
            yield "classifications", name, seed, task_of(x, y, seed, widths, num_train)


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables."""
    found = {}
    for marker, kind, metric in (
        ("table-1", "regressions", "nlpd"), ("table-4", "regressions", "rmse"), ("table-2", "classifications", "nlpd"),
        ("table-6", "classifications", "accuracy"), ("ece", "classifications", "ece"),
    ):  # fmt: skip
        data = record[kind]
        rows = list(next(iter(data.values()))["cells"])
        cells = [[row, *(_cell(one["cells"][row], metric) for one in data.values())] for row in rows]
        found[marker] = table(["", *data], cells)
    sizes = [[name, one["rows"], "-".join(map(str, one["widths"]))] for k in ("regressions", "classifications")
             for name, one in record[k].items()]  # fmt: skip
    found["sizes"] = table(["data", "rows", "network"], sizes)
    away = record["outside"]
    found["outside"] = table(["", "AUROC"], [[row, spread([one[row]["auroc"] for one in away])] for row in away[0]])
    return found


def _cell(cells: list[dict[str, float]], metric: str) -> str:
    return spread([one[metric] for one in cells])


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw Figures 1, 3 and 4."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = record["moons"]
    figure, axes = plt.subplots(2, 4, figsize=(11, 5.6), sharex=True, sharey=True, layout="constrained")
    names = [name for name in found["panels"] if name != "MAP"]
    x, y = np.array(found["x"]), np.array(found["y"])
    for axis, name in zip(axes.flat, ["MAP", *names[:3], "MAP", *names[3:]], strict=True):
        values = np.array(found["panels"][name]).T
        drawn = axis.contourf(found["ticks"], found["ticks"], values, levels=np.linspace(0, 1, 21), cmap="RdBu")
        axis.contour(found["ticks"], found["ticks"], values, levels=[0.5], colors="k", linewidths=1)
        axis.scatter(*x.T, c=np.where(y == 1, "navy", "darkred"), s=6)
        axis.set_title(name.replace(": ", ":\n"), fontsize=9)
    figure.colorbar(drawn, ax=axes, label="probability of class 1", ticks=[0, 0.25, 0.5, 0.75, 1])
    figure.savefig(directory / f"{NAME}.png", dpi=90)
    plt.close(figure)
    _draw_digits(record, directory)


def _draw_digits(record: dict[str, Any], directory: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    away, centres = record["outside"], (BINS[1:] + BINS[:-1]) / 2
    for line, posterior in zip(axes, (KINDS["kronecker"], "mean-field VI"), strict=True):
        rows = ["MAP", *(f"{posterior}: {way}" for way in ("sampling", "GLM, scaled", "single pass, scaled"))]
        for row in rows:
            if record["rotated"]:
                line[0].plot(ANGLES, np.mean(record["rotated"][row], 0), label=row.removeprefix(f"{posterior}: "))
        line[0].set(title=f"digits, rotated\n{posterior}", xlabel="angle in degrees", ylabel="NLPD")
        for axis, row in zip(line[1:], (rows[0], rows[1], rows[3]), strict=True):
            for index, label in enumerate(("digits 0 to 4 (known)", "digits 5 to 9 (unknown)")):
                share = np.mean([one[row]["histograms"][index] for one in away], 0)
                axis.bar(centres, share, width=0.05, alpha=0.6, label=label)
            axis.set(title=row.replace(": ", ":\n"), xlabel="entropy / log 5", ylabel="share of rows", ylim=(0, 1))
    axes[0, 1].legend(frameon=False, fontsize=8)
    if record["rotated"]:
        axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(directory / f"{NAME}_digits.png", dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    (arguments,) = parse_arguments(Arguments)
    torch.set_num_threads(1)
    keep(NAME, lambda: run(arguments))
