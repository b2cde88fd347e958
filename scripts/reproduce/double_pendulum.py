"""Minibatch Metropolis with and without the noise penalty on the double pendulum (penalty_bnn section 5).

    python -m scripts.reproduce.double_pendulum

A mixture-density network of 419 parameters predicts the positions of both masses 20 steps ahead. Five samplers on
the likelihood of 60 rows (and one on all 2992) are compared as in Table 1, each from the same trained networks.
Hamiltonian Monte Carlo on all rows explores the distributions of two of them further than random walks do.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from hf_bayes import (
    BayesianModelForSequenceClassification,
    BayesianTrainer,
    BayesianTrainingArguments,
    MixtureDensity,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Kernel, Problem
from hf_bayes.diagnostics.convergence import rhat
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig, PenaltyState
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.metrics import average_coverage_error
from hf_bayes.training.setup import place_chains
from scripts.reproduce.report import keep, legend_once, spread, table
from scripts.reproduce.streamlined_models import MLPConfig, MLPForSequenceClassification

NAME = "double_pendulum"
LAGS = (20, 21, 22, 23, 24)  # eq. 18
WIDTHS = (20, 10, 10, 9)
LIKELIHOOD = MixtureDensity(num_components=1, num_numbers=4, min_std=1e-30)
"""Nine outputs: the logit of the mixture's one component, four means, and four log standard deviations. The logit
changes nothing, but the paper's 419 parameters are only reached with it. The paper has no smallest standard deviation,
and no chain comes near this one."""
PLOTTED = ("tempered", "batched", "pseudo-SGLD", "penalty")
"""The panels of Figure 2, from top to bottom."""
L2 = 1e-5
"""The lambda of the paper's prior exp(-lambda |theta|^2), a Gaussian of standard deviation 224."""
STEP = 0.01
"""The seconds between two points. The paper does not give this number."""


class Rows(NamedTuple):
    """The rows of a data set: x [R, 20], y [R, 4] in metres."""

    x: Tensor
    y: Tensor

    def as_dicts(self) -> list[dict[str, Tensor]]:
        """Return the rows of a data set for a trainer."""
        return [{"input_values": x, "labels": y} for x, y in zip(*self, strict=True)]


def positions(num_points: int, *, step: float = STEP) -> np.ndarray:
    """Return [num_points, 4]: coordinates of both masses (1 kg, rods of 1 m), from rest at 120 and -10 degrees."""
    gravity = 9.81

    def velocity(_: float, state: np.ndarray) -> list[float]:
        a, b, u, v = state  # angles and angular velocities
        sine, cosine = math.sin(a - b), math.cos(a - b)
        mass = 1 + sine**2
        first = gravity * (math.sin(b) * cosine - 2 * math.sin(a)) - sine * (u**2 * cosine + v**2)
        second = 2 * (u**2 * sine - gravity * math.sin(b) + gravity * math.sin(a) * cosine) + v**2 * sine * cosine
        return [u, v, first / mass, second / mass]

    times = step * np.arange(num_points)
    start = [math.radians(120), math.radians(-10), 0.0, 0.0]
    a, b = solve_ivp(velocity, (0, times[-1]), start, method="DOP853", t_eval=times, rtol=1e-10, atol=1e-10).y[:2]
    first = np.stack([np.sin(a), -np.cos(a)], 1)
    return np.concatenate([first, first + np.stack([np.sin(b), -np.cos(b)], 1)], 1)


def pendulum(num_rows: int = 9975, num_train: int = 2992) -> tuple[Rows, Rows]:
    """Return training and test rows, split in time (section 5.2)."""
    y = torch.tensor(positions(num_rows + max(LAGS)), dtype=torch.float32)
    at = torch.arange(max(LAGS), len(y))
    x = torch.cat([y[at - lag] for lag in LAGS], 1)
    return Rows(x[:num_train], y[at[:num_train]]), Rows(x[num_train:], y[at[num_train:]])


def network() -> MLPForSequenceClassification:
    """Return the paper's network. Its weights do not matter, because chains start at ``starts``."""
    torch.manual_seed(0)
    return MLPForSequenceClassification(MLPConfig(WIDTHS, "tanh"))


def starts(num_chains: int, seed: int) -> Tensor:
    """Return starts [M, 419]: weights N(0, 1 / fan-in), biases 0."""
    rng, pieces = generator(seed, "starts"), []
    for parameter in network().parameters():
        scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.0
        pieces.append(scale * torch.randn(num_chains, parameter.numel(), generator=rng))
    return torch.cat(pieces, 1)


class Unpenalised(PenaltyConfig):
    """Minibatch Metropolis that takes the batches of an update for all of the data, so that its penalty is 0."""

    def build(self, problem: Problem) -> Kernel[PenaltyState]:
        disjoint = PenaltyConfig(**{**vars(self), "replacement": False})
        return disjoint.build(problem._replace(batch_fraction=1.0))


@dataclass(frozen=True)
class Contender:
    """A method in one line of the table.

    Attributes:
        method: the config of the method.
        full: True if the likelihood has the weight of all rows, False for the weight of one batch (the paper's target).
        trained: True if chains start at trained networks.
        updates: share of the run's updates. Expensive methods make fewer.
    """

    method: MethodConfig
    full: bool = False
    trained: bool = True
    updates: float = 1.0


PRIOR_STD = (2 * L2) ** -0.5
RANDOM_WALK = MetropolisConfig(target_acceptance=0.234, adapt_scale=False, prior_std=PRIOR_STD)
"""Proposals with one standard deviation for all parameters, as those of ``penalty``."""
HAMILTONIAN = HMCConfig(num_leapfrog=20, prior_std=PRIOR_STD)
LANGEVIN = SGLDConfig(prior_std=PRIOR_STD)
PENALTY = PenaltyConfig(target_acceptance=0.234, prior_std=PRIOR_STD)
BATCHED = Unpenalised(target_acceptance=0.234, prior_std=PRIOR_STD)

CONTENDERS = {
    "vanilla": Contender(RANDOM_WALK, full=True),
    "tempered": Contender(RANDOM_WALK),
    "batched": Contender(BATCHED),
    "pseudo-SGLD": Contender(LANGEVIN, updates=2),
    "penalty": Contender(PENALTY),
    "tempered, HMC": Contender(HAMILTONIAN, updates=0.5),
    "tempered, untrained start": Contender(RANDOM_WALK, trained=False),
    "tempered, HMC, untrained start": Contender(HAMILTONIAN, trained=False, updates=0.5),
    "batched, untrained start": Contender(BATCHED, trained=False),
    "pseudo-SGLD, untrained start": Contender(LANGEVIN, trained=False, updates=2),
    "penalty, untrained start": Contender(PENALTY, trained=False),
    "batched, T = 1": Contender(BATCHED, full=True),
    "penalty, T = 1": Contender(PENALTY, full=True),
}
"""The paper's five first, then further methods for comparison."""


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        num_rows, num_train: rows of the simulation.
        updates: updates of the random walks. The first half is burn-in, in which the step size adapts.
        training: updates of AdamW before sampling.
        num_chains, num_draws: chains and draws of each line and seed.
        size, count: rows of a batch, and batches.
        sizes: rows of a batch in Figure 3. The number of batches is the number that the data fill.
        stretch: test rows in Figure 2.
    """

    num_rows: int = 9975
    num_train: int = 2992
    updates: int = 8000
    training: int = 2000
    num_chains: int = 4
    num_draws: int = 10
    size: int = 60
    count: int = 100
    sizes: tuple[int, ...] = (20, 60, 200)
    num_seeds: int = 3
    stretch: tuple[int, int] = (1000, 1300)


def train(
    method: MethodConfig, start: Tensor, rows: Rows, *, steps: int, rate: float, seed: int,
    weight: float | None = None, size: int | None = None, count: int = 1,
) -> BayesianTrainer:  # fmt: skip
    """Return a trainer whose chains have made ``steps`` updates from ``start`` [M, 419].

    Args:
        rate: the learning rate. Of random walks and leapfrog steps, the first step size.
        weight: N, the weight of the likelihood in rows; None for all rows. 2992 is the Bayes posterior. The rows of one
            batch are the paper's target, in which the likelihood of a batch counts once.
        size, count: rows of a batch, and batches of an update; None for all rows in one batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = BayesianTrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, num_data=weight, minibatch="shared",
            per_device_train_batch_size=size or len(rows.y), gradient_accumulation_steps=count, probe_steps=0,
            members_per_pass=len(start), map_updates=0, use_cpu=True, report_to="none", disable_tqdm=True,
            save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = BayesianTrainer(
            network(), dataclasses.replace(method, num_chains=len(start)), args, subspace="all",
            train_dataset=rows.as_dicts(), likelihood=LIKELIHOOD,
        )  # fmt: skip
        place_chains(trainer.bayesian, start)
        trainer.train()
    return trainer


def saved_and_loaded(trainer: BayesianTrainer) -> BayesianModelForSequenceClassification:
    """Return the model that a user loads from the posterior's directory."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        return BayesianModelForSequenceClassification.from_pretrained(folder, base_model=network())


@torch.no_grad()
def scores(model: BayesianModelForSequenceClassification, num_chains: int, train: Rows, test: Rows) -> dict[str, Any]:
    """Return Table 1's columns for a posterior, and R-hat of the training data's likelihood."""
    tested = model(input_values=test.x, labels=test.y)  # eqs 19 and 21: the mixture of all members
    covered = ((test.y - tested.logits).abs() <= tested.predictive_std).float().mean(1)
    outputs = model.member_logits({"input_values": train.x})
    log_probs = LIKELIHOOD.log_prob(outputs.double(), train.y.double())
    levels = -log_probs.mean(1).view(num_chains, -1)
    quarter = max(1, levels.shape[1] // 4)
    return {
        "test": float(tested.loss),
        "train": float(model(input_values=train.x, labels=train.y).loss),
        "ace": average_coverage_error(covered.numpy()),
        "coverage": float(covered.mean()),
        "first": float(levels[:, :quarter].mean()),
        "last": float(levels[:, -quarter:].mean()),
        **({"rhat": float(rhat(levels[..., None]))} if levels.shape[1] >= 4 else {}),
    }


class LineResult(NamedTuple):
    """The model that a line predicts with, and the line's numbers."""

    model: BayesianModelForSequenceClassification
    numbers: dict[str, Any]


def run_line(
    line: Contender, start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int, *,
    size: int, count: int, rate: float,
) -> LineResult:  # fmt: skip
    """Run a line of the table, and score its posterior; ``rows`` are for training and for the test."""
    steps = max(2 * settings.num_draws, round(line.updates * settings.updates))
    method = dataclasses.replace(line.method, draws_per_chain=settings.num_draws)
    weight = None if line.full else size
    if isinstance(method, SGLDConfig):  # the paper's step eta multiplies the gradient of U, and not of U / N
        count, rate = 1, rate * (weight or len(rows[0].y))
    batches: dict[str, Any] = {} if method.requirements.all_data_in_every_update else {"size": size, "count": count}
    begin = time.process_time()
    trainer = train(method, start, rows[0], steps=steps, rate=rate, seed=seed, weight=weight, **batches)
    seconds = time.process_time() - begin
    told = {name: float(values.mean()) for name, values in trainer.monitor.mean_info().items()}
    names = ("acceptance", "step_size", "penalty", "beyond_series")
    kept = {name: told[name] for name in names if name in told}
    kept["moved"] = float((trainer.run.theta - start).square().mean().sqrt())
    model = saved_and_loaded(trainer)
    return LineResult(model, {**scores(model, len(start), *rows), **kept, "updates": steps, "seconds": seconds})


def run_stable(line: Contender, start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int) -> LineResult:
    """Run a line at the paper's sizes. SGLD runs at the paper's eta, divided by 10 until it does not diverge."""
    for rate in (1e-5, 1e-6, 1e-7, 1e-8) if isinstance(line.method, SGLDConfig) else (1e-4,):
        try:
            found = run_line(line, start, rows, settings, seed, size=settings.size, count=settings.count, rate=rate)
        except FloatingPointError:
            continue
        return found._replace(numbers={**found.numbers, "rate": rate})
    raise RuntimeError("pseudo-SGLD diverges even at eta = 1e-8")


def run_size(
    start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int, size: int, step: float
) -> dict[str, Any]:
    """Run a point of Figure 3: one step size for all, and as many batches as the data fill."""
    method = PenaltyConfig(step_size=step, target_acceptance=None, prior_std=PRIOR_STD)
    count = len(rows[0].y) // size
    line = Contender(method, updates=0.5)
    found = run_line(line, start, rows, settings, seed, size=size, count=count, rate=step)
    return {"size": size, "count": count, **found.numbers}


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
