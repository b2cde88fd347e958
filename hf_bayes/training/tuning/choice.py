"""The choice between finished trials, in words and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from hf_bayes.training.tuning.candidates import PLAIN
from hf_bayes.training.tuning.record import TuningTrial


def best_of(trials: Sequence[TuningTrial]) -> TuningTrial:
    """Return the cheapest trial whose NLL is within one standard error of the lowest one.

    Cheaper means fewer forward passes of a prediction, and then a lower NLL.

    Raises:
        ValueError: if every trial failed.
    """
    finished = [trial for trial in trials if math.isfinite(trial.mean_nll)]
    if not finished:
        reasons = "; ".join(f"{trial.name}: {trial.failure}" for trial in trials)
        raise ValueError(f"no candidate ran to its end, so there is nothing to choose from ({reasons})")
    lowest = min(finished, key=lambda trial: trial.mean_nll)
    near = [trial for trial in finished if trial is lowest or _within(trial, lowest)]
    return min(near, key=lambda trial: (trial.cost, trial.mean_nll))


def _within(trial: TuningTrial, lowest: TuningTrial) -> bool:
    difference, error = trial.difference(lowest)
    return difference <= error


def sentence(chosen: TuningTrial, trials: Sequence[TuningTrial]) -> str:
    """Return the result in up to three sentences."""
    finished = [trial for trial in trials if math.isfinite(trial.mean_nll)]
    plain = [trial for trial in finished if trial.name.startswith(PLAIN)]
    others = [trial for trial in finished if trial not in plain]
    rival = "plain fine-tuning" + (" with a temperature" if "temperature" in chosen.metrics else "")
    text = f"{chosen.name} is chosen: held-out NLL {chosen.mean_nll:.4f}"
    if plain and chosen not in plain:
        difference, error = chosen.difference(min(plain, key=lambda trial: trial.mean_nll))
        text += f", {-difference:.4f} (standard error {error:.2g}) less than {rival}"
    text += "."
    if chosen in plain and others:
        other = min(others, key=lambda trial: trial.mean_nll)
        difference, error = other.difference(chosen)
        text += (
            f" {rival.capitalize()} is as good here: the best other method ({other.name}) differs by "
            f"{difference:+.4f} (standard error {error:.2g}) and costs more."
        )
    for trial in finished:
        if trial.name == chosen.name and trial.gradients > chosen.gradients:
            text += (
                f" The chosen run has {chosen.gradients:,} gradients; with {trial.gradients:,} the NLL is "
                f"{trial.mean_nll:.4f}, so do not train longer."
            )
    return text


def as_table(trials: Sequence[TuningTrial], chosen: TuningTrial) -> Table:
    """Return the trials as a table, best first. ``t`` is the temperature, ``cost`` the forward passes."""
    table = Table(title="Held-out rows", title_justify="left", box=None, padding=(0, 1, 0, 0))
    failures = [f"{trial.name} failed: {trial.failure}" for trial in trials if trial.failure]
    table.caption, table.caption_justify = "\n".join(failures), "left"
    for column in ("method", "gradients", "NLL", "NLL - chosen's", "acc.", "ECE", "t", "cost"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for trial in sorted(trials, key=lambda trial: (trial.mean_nll, trial.name)):
        if trial.failure:
            continue
        difference, error = trial.difference(chosen)
        relative = "chosen" if trial is chosen else f"{difference:+.3f} ± {error:.3f}"
        numbers = (
            f"{trial.metrics[name]:.3f}" if name in trial.metrics else "-"
            for name in ("accuracy", "ece", "temperature")
        )
        gradients = f"{trial.gradients:,}"
        table.add_row(trial.name, gradients, f"{trial.mean_nll:.4f}", relative, *numbers, str(trial.cost))
    return table
