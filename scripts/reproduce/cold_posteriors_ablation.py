"""The accuracy of SGHMC, with and without preconditioner and cycles (cold_posteriors app. J, Tables 1 and 2).

    python -m scripts.reproduce.cold_posteriors_ablation --output_dir sweep

The model (CNN-LSTM), the data and the settings come from ``temperature_sweep``. Three chains run for each of four
variants, at T = 1 and at a low temperature. At the end of each cycle, with or without cycles in the step size, the
kinetic temperature of each tensor is compared with its 99 % interval (eq. 42), and the configurational temperature
(eq. 43) is computed.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_bayes import BayesianTrainer
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.diagnostics.temperatures import share_within_interval
from scripts.reproduce.report import keep, table
from scripts.reproduce.temperature_sweep import quiet
from scripts.reproduce.temperature_sweep_cells import method_of, score, trainer_of
from scripts.reproduce.temperature_sweep_problem import Arguments as SweepArguments
from scripts.reproduce.temperature_sweep_problem import Problem, prepare

NAME = "cold_posteriors_ablation"


@dataclass
class Arguments(SweepArguments):
    """The arguments of the sweep, with three chains instead of four."""

    num_chains: int = field(default=3, metadata={"help": "Replicates."})
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.01])


class EndsOfCycles(TrainerCallback):
    """The temperatures of each chain at the end of each cycle after burn-in.

    Attributes:
        kinetic: [M, S] for each tensor, one element per end, divided by T.
        law: the expected value under the discretisation, divided by T.
        configurational: [M], divided by T.
    """

    def __init__(self) -> None:
        self.trainer: BayesianTrainer
        self.kinetic: list[Tensor] = []
        self.law: list[Tensor] = []
        self.configurational: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, info, heat = self.trainer.run, self.trainer.monitor.info, self.trainer.method.temperature
        if run.num_updates in run.problem.draw_steps:
            momentum = run.state.momentum
            self.kinetic.append(per_tensor_mean(momentum.square(), self.trainer.bayesian.layout.sizes) / heat)
            self.law.append(info["kinetic_temperature_law"] / heat)
            self.configurational.append(info["configurational_temperature"] / heat)


def variant(problem: Problem, *, temperature: float, preconditioned: bool, cyclical: bool) -> dict[str, Any]:
    """Run a variant and return the temperatures of its chains."""
    args, start = problem.args, time.perf_counter()
    chain: Any = method_of(args, "sghmc_serial", temperature)
    method = dataclasses.replace(
        chain,
        num_chains=args.num_chains,
        preconditioner="layerwise" if preconditioned else "identity",
    )
    if not cyclical:
        method = dataclasses.replace(method, schedule=None)
    ends = EndsOfCycles()
    with tempfile.TemporaryDirectory() as scratch:
        ends.trainer = trainer_of(problem, method, args.seeds[0], Path(scratch), problem.load())
        ends.trainer.add_callback(ends)
        ends.trainer.train()
        draws = ends.trainer.posterior.sample().unflatten(0, (args.num_chains, -1))
        bayesian = ends.trainer.bayesian
        scores = []
        for of_chain in draws:
            bayesian.show(of_chain)
            scores.append(score(problem, bayesian))
        sizes = bayesian.layout.sizes
        names = list(bayesian.layout.names)
        bayesian.detach()

    def share(law: list[Tensor]) -> list[float]:
        """Return [M]: the mean share over cycles of tensors within their interval around ``law``."""
        pairs = zip(ends.kinetic, law, strict=True)
        return torch.stack([share_within_interval(k, sizes, around) for k, around in pairs]).mean(0).tolist()

    return {
        **{"temperature": temperature, "preconditioned": preconditioned, "cyclical": cyclical},
        "kinetic_share": share([torch.ones_like(law) for law in ends.law]),
        "kinetic_share_of_law": share(ends.law),
        "kinetic": dict(zip(names, torch.stack(ends.kinetic).mean((0, 1)).tolist(), strict=True)),
        "configurational": torch.stack(ends.configurational).mean(0).tolist(),
        **{name: [one[name] for one in scores] for name in ("accuracy", "nll")},
        "seconds": round(time.perf_counter() - start, 1),
    }


def experiment(args: Arguments) -> dict[str, Any]:
    """Run all four variants at each temperature."""
    problem = prepare(args)
    rows = [
        variant(problem, temperature=temperature, preconditioned=preconditioned, cyclical=cyclical)
        for temperature in args.temperatures
        for cyclical in (True, False)
        for preconditioned in (True, False)
    ]
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k != "output_dir"}
    return {"settings": settings, "num_held_out": len(problem.held_out), "rows": rows}


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables: the paper's columns with standard errors over chains, and the temperature of each tensor."""
    columns = ["kinetic_share", "configurational", "accuracy", "nll", "kinetic_share_of_law"]
    head = ["T", "preconditioner", "cycles", "E[T_K in R_99]", "E[T_C] / T", "accuracy", "cross-entropy"]
    rows = [[*_variant(row), *(_with_error(row[column]) for column in columns)] for row in record["rows"]]
    tensors = list(record["rows"][0]["kinetic"])
    hot = [[*_variant(row), *(f"{row['kinetic'][name]:.3g}" for name in tensors)] for row in record["rows"]]
    return {
        "ablation": table([*head, "the same, around the discretisation's law"], rows),
        "tensors": table(["T", "preconditioner", "cycles", *tensors], hot),
    }


def _variant(row: dict[str, Any]) -> list[str]:
    words = {True: "yes", False: "no"}
    return [f"{row['temperature']:g}", words[row["preconditioned"]], words[row["cyclical"]]]


def _with_error(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the kinetic temperature of each tensor over T, one panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heats = sorted({row["temperature"] for row in record["rows"]}, reverse=True)
    figure, axes = plt.subplots(1, len(heats), figsize=(6 * len(heats), 4.6), layout="constrained", squeeze=False)
    marks = {
        (True, True): ("o", "C0"),
        (False, True): ("s", "C1"),
        (True, False): ("^", "C2"),
        (False, False): ("x", "C3"),
    }
    for axis, heat in zip(axes[0], heats, strict=True):
        for row in record["rows"]:
            if row["temperature"] != heat:
                continue
            marker, colour = marks[row["preconditioned"], row["cyclical"]]
            words = [
                "preconditioner" if row["preconditioned"] else "no preconditioner",
                "cycles" if row["cyclical"] else "constant step",
            ]
            places = range(len(row["kinetic"]))
            axis.plot(places, row["kinetic"].values(), marker, color=colour, ms=6, ls="none", label=", ".join(words))
            axis.set_xticks(
                places, [name.replace("layers.0.", "lstm ") for name in row["kinetic"]], rotation=35, ha="right"
            )
        axis.axhline(1, color="0.4", lw=1, label="accurate simulation")
        axis.set(title=f"T = {heat:g}", ylabel="kinetic temperature / T at the ends of cycles", yscale="log")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    (arguments,) = parse_arguments(Arguments)
    quiet()
    keep(NAME, lambda: experiment(arguments))
