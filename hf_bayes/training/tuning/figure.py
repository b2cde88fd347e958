"""A figure of the trials of a tuning."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from hf_bayes.training.tuning.record import TuningTrial


def draw(rounds: Sequence[Sequence[TuningTrial]], chosen: TuningTrial, path: str | os.PathLike[str]) -> None:
    """Write a PNG with the held-out NLL of each trial, and the standard error of its difference to the chosen one.

    Args:
        rounds: the trials of each round; the last round has the largest budget.
        chosen: the trial that was chosen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    last = {trial.name for trial in rounds[-1]}
    finished = [trial for trials in rounds for trial in trials if math.isfinite(trial.mean_nll)]
    best = {trial.name: trial.mean_nll for trial in sorted(finished, key=lambda trial: -trial.mean_nll)}
    order = sorted(best, key=lambda name: (name not in last, best[name]))
    figure = Figure(figsize=(8, 0.35 * len(order) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for trial in finished:
        _, error = trial.difference(chosen)
        colour = "tab:green" if trial is chosen else "tab:blue" if trial in rounds[-1] else "silver"
        place = order.index(trial.name)
        axis.errorbar(trial.mean_nll, place, xerr=None if trial is chosen else error, fmt="o", color=colour, capsize=3)
    axis.set_yticks(range(len(order)), order)
    axis.invert_yaxis()
    axis.axvline(chosen.mean_nll, color="tab:green", linewidth=0.8, linestyle=":")
    axis.set_xlabel("held-out NLL in nats per term")
    axis.set_title(
        "green: chosen; grey: the first round, with a smaller budget; blue: the second round\n"
        "bars: standard error of the difference to the chosen method", fontsize=9, loc="left",
    )  # fmt: skip
    axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=130)
