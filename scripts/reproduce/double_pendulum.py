"""Minibatch Metropolis with and without the noise penalty on the double pendulum (penalty_bnn section 5).

    python -m scripts.reproduce.double_pendulum

A mixture-density network of 419 parameters predicts the positions of both masses 20 steps ahead. Five samplers on
the likelihood of 60 rows (and one on all 2992) are compared as in Table 1, each from the same trained networks.
Hamiltonian Monte Carlo on all rows explores the distributions of two of them further than random walks do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import rhat
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.metrics import average_coverage_error
from scripts.reproduce.report import keep, legend_once, spread, table

NAME = "double_pendulum"
LAGS = (20, 21, 22, 23, 24)  # eq. 18
HIDDEN = 10
SIZES = {"w1": (20, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN, 9), "b3": (9,)}
"""Nine outputs: four means, four log standard deviations, and the logit of the mixture's one component. The last
changes nothing, but the paper's 419 parameters are only reached with it."""
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


def starts(num_chains: int, seed: int) -> Tensor:
    """Return starts [M, 419]: weights N(0, 1 / fan-in), biases 0."""
    rng, pieces = generator(seed, "starts"), []
    for shape in SIZES.values():
        scale = shape[0] ** -0.5 if len(shape) == 2 else 0.0
        pieces.append(scale * torch.randn(num_chains, math.prod(shape), generator=rng))
    return torch.cat(pieces, 1)


def network(theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log standard deviation [M, R, 4] of each row for theta [M, 419] and x [R, 20]."""
    m, sizes = len(theta), [math.prod(shape) for shape in SIZES.values()]
    w1, b1, w2, b2, w3, b3 = (
        piece.view(m, *shape) for piece, shape in zip(theta.split(sizes, 1), SIZES.values(), strict=True)
    )
    hidden = torch.tanh(torch.baddbmm(b1[:, None], x.expand(m, -1, -1), w1))
    hidden = torch.tanh(torch.baddbmm(b2[:, None], hidden, w2))
    out = torch.baddbmm(b3[:, None], hidden, w3)
    return out[..., :4], out[..., 4:8]


def log_lik(theta: Tensor, rows: Rows) -> Tensor:
    """Return the log-likelihood [M, R] in nats."""
    mean, log_std = network(theta, rows.x)
    squares = ((rows.y - mean) * (-log_std).exp()).square()
    return -(0.5 * squares + log_std).sum(2) - 2 * math.log(2 * math.pi)


class Batch(NamedTuple):
    """One of the K batches of an update: the rows [K, n] of all batches, drawn independently, and its own index."""

    rows: Tensor
    index: int


def batches(num_rows: int, count: int, size: int, seed: int) -> Iterator[Batch]:
    """Yield updates of ``count`` batches without end."""
    rng = generator(seed, "batches")
    while True:
        rows = torch.randint(num_rows, (count, size), generator=rng)
        yield from (Batch(rows, index) for index in range(count))


class Energy:
    """The energy U = - weight * (mean of log p(y | x, theta) over the batch) + lambda |theta|^2.

    Weight 2992 is the Bayes posterior. Weight n is the paper's target, where the likelihood of a batch counts once.
    All batches of an update have one theta: the network runs once on all data, and each batch picks its rows.
    """

    def __init__(self, rows: Rows, weight: float) -> None:
        self.rows, self.weight = rows, weight
        self._known: tuple[Tensor | None, Tensor | None] = (None, None)
        self._of_batches: Sequence[Tensor]

    def __call__(self, theta: Tensor, batch: Batch | None) -> Tensor:
        prior = L2 * theta.square().sum(1)
        if batch is None:
            return prior - self.weight * log_lik(theta, self.rows).mean(1)
        if len(batch.rows) == 1:
            (rows,) = batch.rows
            return prior - self.weight * log_lik(theta, Rows(self.rows.x[rows], self.rows.y[rows])).mean(1)
        theta_before, rows_before = self._known
        if theta is not theta_before or batch.rows is not rows_before:
            of_batches = log_lik(theta, self.rows)[:, batch.rows].mean(2)
            self._known = theta, batch.rows
            self._of_batches = (prior[:, None] - self.weight * of_batches).unbind(1)
        return self._of_batches[batch.index]


@dataclass(frozen=True)
class Contender:
    """A method in one line of the table.

    Attributes:
        method: the config of the method.
        weight: the weight of the likelihood in rows; None is the size of a batch.
        minibatch: True if an update uses K batches instead of all data.
        trained: True if chains start at trained networks.
        updates: share of the run's updates. Expensive methods make fewer.
        penalised: False makes the penalty 0.
    """

    method: MethodConfig
    weight: float | None = None
    minibatch: bool = False
    trained: bool = True
    updates: float = 1.0
    penalised: bool = True


RANDOM_WALK = MetropolisConfig(target_acceptance=0.234)
HAMILTONIAN = HMCConfig(num_leapfrog=20)
PENALTY = PenaltyConfig(target_acceptance=0.234)
BATCHED = PenaltyConfig(target_acceptance=0.234, replacement=False)
"""The setting that declares the batches of an update to be all data: the penalty is 0 without noise to correct."""


def contenders(num_data: int) -> dict[str, Contender]:
    """Return name -> contender: the paper's five first, then further methods for comparison."""
    return {
        "vanilla": Contender(RANDOM_WALK, num_data),
        "tempered": Contender(RANDOM_WALK),
        "batched": Contender(BATCHED, minibatch=True, penalised=False),
        "pseudo-SGLD": Contender(SGLDConfig(), minibatch=True, updates=2),
        "penalty": Contender(PENALTY, minibatch=True),
        "tempered, HMC": Contender(HAMILTONIAN, updates=0.5),
        "tempered, untrained start": Contender(RANDOM_WALK, trained=False),
        "tempered, HMC, untrained start": Contender(HAMILTONIAN, trained=False, updates=0.5),
        "batched, untrained start": Contender(BATCHED, minibatch=True, trained=False, penalised=False),
        "pseudo-SGLD, untrained start": Contender(SGLDConfig(), minibatch=True, trained=False, updates=2),
        "penalty, untrained start": Contender(PENALTY, minibatch=True, trained=False),
        "batched, T = 1": Contender(BATCHED, num_data, minibatch=True, penalised=False),
        "penalty, T = 1": Contender(PENALTY, num_data, minibatch=True),
    }


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


def predictive(draws: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [R, 4] of the mixture over draws [J, 419] (eq. 21)."""
    mean, log_std = (torch.cat(parts) for parts in zip(*(network(part, x) for part in draws.split(10)), strict=True))
    average = mean.mean(0)
    return average, ((2 * log_std).exp() + mean.square()).mean(0).sub(average.square()).clamp_min(0).sqrt()


def mixture_nll(draws: Tensor, rows: Rows) -> float:
    """Return the NLL of the mixture (eq. 19)."""
    columns = torch.cat([log_lik(part, rows) for part in draws.split(10)]).double()
    return float(math.log(len(draws)) - columns.logsumexp(0).mean())


def scores(draws: Tensor, train: Rows, test: Rows) -> dict[str, Any]:
    """Return Table 1's columns of draws [M, S, 419], and R-hat of the training data's likelihood."""
    mean, std = predictive(draws.flatten(0, 1), test.x)
    covered = ((test.y - mean).abs() <= std).float().mean(1)
    levels = torch.stack([-log_lik(chain, train).mean(1) for chain in draws])
    quarter = max(1, levels.shape[1] // 4)
    return {
        "test": mixture_nll(draws.flatten(0, 1), test),
        "train": mixture_nll(draws.flatten(0, 1), train),
        "ace": average_coverage_error(covered.numpy()),
        "coverage": float(covered.mean()),
        "first": float(levels[:, :quarter].mean()),
        "last": float(levels[:, -quarter:].mean()),
        **({"rhat": float(rhat(levels[..., None]))} if levels.shape[1] >= 4 else {}),
    }


def train_networks(start: Tensor, rows: Rows, settings: Settings, seed: int) -> Tensor:
    """Return [M, 419]: the maximum of the Bayes posterior that AdamW finds."""
    method, steps = MAPConfig(num_chains=len(start)), settings.training
    found = sample(
        Energy(rows, len(rows.y)), start, method, num_steps=steps, burn_in=steps - 1, learning_rate=1e-2,
        num_data=len(rows.y), seed=seed, progress=False,
    )  # fmt: skip
    return found.draws[:, -1]


def run_line(
    line: Contender, start: Tensor, train: Rows, settings: Settings, seed: int, *, size: int, count: int, rate: float
) -> tuple[Tensor, dict[str, Any]]:
    """Return draws [M, S, 419], and the sampler's statistics after burn-in."""
    steps = max(2 * settings.num_draws, round(line.updates * settings.updates))
    count = 1 if isinstance(line.method, SGLDConfig) else count
    arguments: dict[str, Any] = {}
    if line.minibatch:
        arguments = {"batches": batches(len(train.y), count, size, seed), "batches_per_step": count}
    if not line.penalised:
        arguments["batch_fraction"] = 1 / count
    begin = time.process_time()
    found = sample(
        Energy(train, size if line.weight is None else line.weight), start, line.method, num_steps=steps,
        learning_rate=rate, burn_in=0.5, thin=steps // 2 // settings.num_draws, seed=seed, progress=False, **arguments,
    )  # fmt: skip
    told = {name: float(values[steps // 2 :].mean()) for name, values in found.info.items()}
    names = ("acceptance", "step_size", "penalty", "beyond_series")
    kept = {name: told[name] for name in names if name in told}
    kept["moved"] = float((found.draws[:, -1] - start).square().mean().sqrt())
    return found.draws, {**kept, "updates": steps, "seconds": time.process_time() - begin}


def run_stable(
    line: Contender, start: Tensor, train: Rows, settings: Settings, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Run a line at the paper's sizes. SGLD runs at the paper's eta, divided by 10 until it does not diverge."""
    for rate in (1e-5, 1e-6, 1e-7, 1e-8) if isinstance(line.method, SGLDConfig) else (1e-4,):
        try:
            draws, told = run_line(
                line, start, train, settings, seed, size=settings.size, count=settings.count, rate=rate
            )
        except FloatingPointError:
            continue
        return draws, {**told, "rate": rate}
    raise RuntimeError("pseudo-SGLD diverges even at eta = 1e-8")


def run_size(
    start: Tensor, train: Rows, test: Rows, settings: Settings, seed: int, size: int, step: float
) -> dict[str, Any]:
    """Run a point of Figure 3: one step size for all, and as many batches as the data fill."""
    line = Contender(PenaltyConfig(step_size=step, target_acceptance=None), minibatch=True, updates=0.5)
    count = len(train.y) // size
    draws, told = run_line(line, start, train, settings, seed, size=size, count=count, rate=step)
    return {"size": size, "count": count, **scores(draws, train, test), **told}


def run(settings: Settings) -> dict[str, Any]:
    """Run every line and every size of batch, seed by seed."""
    train, test = pendulum(settings.num_rows, settings.num_train)
    lines = contenders(settings.num_train)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in [*lines, "trained networks"]}
    sizes: list[dict[str, Any]] = []
    stretch = slice(*settings.stretch)
    curves: dict[str, Any] = {"truth": _rounded(test.y[stretch, 2])}
    for seed in range(settings.num_seeds):
        start = starts(settings.num_chains, seed)
        trained = train_networks(start, train, settings, seed)
        found["trained networks"].append(scores(trained[:, None], train, test))
        for name, line in lines.items():
            draws, told = run_stable(line, trained if line.trained else start, train, settings, seed)
            found[name].append({**scores(draws, train, test), **told})
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
            if seed == 0 and name in PLOTTED:
                mean, std = predictive(draws.flatten(0, 1), test.x[stretch])
                curves[name] = {"mean": _rounded(mean[:, 2]), "std": _rounded(std[:, 2])}
        step = found["penalty"][0]["step_size"]
        for size in settings.sizes:
            sizes.append({"seed": seed, **run_size(trained, train, test, settings, seed, size, step)})
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
