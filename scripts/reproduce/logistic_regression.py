"""Bayesian logistic regression with every method of ``sample``, against NUTS (posteriors app. G, Table 3).

    python -m scripts.reproduce.logistic_regression

p(y = 1 | x, w) = sigmoid(w^T x), w ~ N(0, I), on the ten mean features of scikit-learn's breast cancer data,
standardised, and an intercept: 569 rows, 11 weights. The runs use the full batch and batches of 32. The kernel Stein
discrepancy is as in Table 3. Long Hamiltonian Monte Carlo is the reference for means and standard deviations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from hf_bayes.diagnostics.convergence import ess, require_converged
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from scripts.reproduce.logistic_regression_methods import Plan, draws_of, laplace, nuts, plans
from scripts.reproduce.logistic_regression_model import Rows, breast_cancer, pyro_energy
from scripts.reproduce.pyro_package import require_pyro
from scripts.reproduce.report import keep, spread, table
from scripts.reproduce.stein_discrepancy import stein_discrepancy

NAME = "logistic_regression"


def metrics(draws: Tensor, rows: Rows, mean: Tensor, std: Tensor) -> dict[str, list[float]]:
    """Return KSD (in coordinates of the reference's unit scale), ESS and largest errors of each chain of [M, S, d]."""
    leaf = draws.flatten(0, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(rows.energy(leaf, None).sum(), leaf)
    scores = -gradient.view_as(draws) * std
    draws = draws.detach()
    scaled = (draws - mean) / std
    return {
        "ksd": [stein_discrepancy(chain, score) for chain, score in zip(scaled, scores, strict=True)],
        "ess": [float(ess(chain[None]).min()) for chain in draws],
        "mean_error": scaled.mean(1).abs().amax(1).tolist(),
        "std_error": (scaled.std(1) - 1).abs().amax(1).tolist(),
    }


def run(
    *,
    seeds: int = 10,
    num_draws: int = 150,
    updates: int = 20_000,
    batched_updates: int = 60_000,
    kernel_updates: int = 1000,
    reference_chains: int = 64,
    with_nuts: bool = True,
    check_reference: bool = True,
) -> dict[str, Any]:
    """Run every method, Pyro's only with ``with_nuts``. HMC is checked first, and is then the reference."""
    if with_nuts:
        require_pyro()  # a missing package is better found now than after ten minutes
    rows = breast_cancer()
    reference = Plan(HMCConfig(), 0.1, kernel_updates).run(rows, reference_chains, kernel_updates // 2).draws
    if check_reference:
        require_converged(reference, f"HMC in {reference_chains} chains of {kernel_updates} updates")
    mean, std = reference.mean((0, 1)), reference.flatten(0, 1).std(0)
    makers: dict[str, Callable[[], Tensor]] = {
        name: lambda plan=plan: draws_of(plan.run(rows, seeds, num_draws), num_draws)
        for name, plan in plans(updates, batched_updates, kernel_updates).items()
    }
    makers["laplace"] = lambda: laplace(rows, seeds, num_draws, updates // 4)
    if with_nuts:
        makers["NUTS (Pyro)"] = lambda: nuts(rows, seeds, num_draws, warmup=num_draws)
    # nearly independent draws: neighbours come from different chains, or are far apart in one chain
    apart = reference.transpose(0, 1).flatten(0, 1)
    apart = apart[:: len(apart) // (seeds * num_draws)][: seeds * num_draws]
    makers["independent draws"] = lambda: apart.view(num_draws, seeds, -1).transpose(0, 1)

    found: dict[str, Any] = {}
    known = plans(updates, batched_updates, kernel_updates)
    for name, make in makers.items():
        start = time.process_time()
        draws = make()
        seconds = time.process_time() - start
        pooled = draws.flatten(0, 1)
        found[name] = {
            "seconds": seconds,
            "updates": known[name].updates if name in known else None,
            "learning_rate": known[name].learning_rate if name in known else None,
            **metrics(draws, rows, mean, std),
            "mean": ((pooled.mean(0) - mean) / std).tolist(),
            "std": (pooled.std(0) / std).tolist(),
        }
    record = {"seeds": seeds, "num_draws": num_draws, "rows": len(rows.x), "methods": found}
    return record | ({"pyro": same_density(rows, seeds, updates // 20)} if with_nuts else {})


def same_density(rows: Rows, num_chains: int, updates: int) -> dict[str, float]:
    """Run SGHMC on our density and on a Pyro model's, in batches of 32. Return the largest difference, and ms."""
    plan = Plan(SGHMCConfig(), 0.05, updates, batched=True)
    draws, milliseconds = [], []
    for energy in (rows.energy, pyro_energy(rows)):
        start = time.process_time()
        draws.append(plan.run(rows, num_chains, 10, energy).draws)
        milliseconds.append(1000 * (time.process_time() - start) / updates)
    difference = float((draws[0] - draws[1]).abs().max())
    return {"updates": updates, "difference": difference, "plain_ms": milliseconds[0], "pyro_ms": milliseconds[1]}


PAPER = {
    "NUTS (Pyro)": ("2.680", "15.4"),
    "mean_field": ("2.623", "7.0"),
    "mean_field, batch 32": ("2.516", "6.5"),
    "sghmc": ("2.693", "14.4"),
    "sghmc, batch 32": ("2.686", "13.7"),
}
"""The paper's Table 3 (Pima Indians): KSD, seconds of a seed."""


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables: Table 3, with errors against the reference."""
    columns = ["method", "updates", "CPU seconds, all seeds", "paper, one", "KSD", "paper", "ESS"]
    columns += ["largest error of a mean", "largest error of a std"]
    lines = []
    for name, row in record["methods"].items():
        paper = PAPER.get(name, ("", ""))
        errors = [spread(row[key], 2) for key in ("mean_error", "std_error")]
        sizes = "" if name in ("laplace", "mean_field", "mean_field, batch 32") else spread(row["ess"], 0)
        timed = f"{row['seconds']:.1f}" if name != "independent draws" else ""
        lines.append([name, row["updates"] or "", timed, paper[1], spread(row["ksd"]), paper[0], sizes, *errors])
    result = {"table3": table(columns, lines), "pyro": ""}
    if "pyro" in record:
        row = record["pyro"]
        result["pyro"] = table(
            ["updates", "ms an update, U written down", "ms an update, U of the Pyro model", "largest difference"],
            [[row["updates"], row["plain_ms"], row["pyro_ms"], f"{row['difference']:.0e}"]],
        )
    return result


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw mean and standard deviation of every weight against the reference, with all seeds pooled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    exact = ("hmc", "NUTS (Pyro)")
    panels = {
        "full batch": [name for name in record["methods"] if "batch" not in name and name != "independent draws"],
        "batches of 32": [name for name in record["methods"] if "batch" in name],
    }
    figure, axes = plt.subplots(2, 1, figsize=(12, 7.5), sharex=True, sharey=True)
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        axis.axhspan(-1, 1, color="0.9", label="reference: mean ± std")
        axis.axhline(0, color="0.5", linewidth=0.8)
        for index, name in enumerate(names):
            row = record["methods"][name]
            at = np.arange(len(row["mean"])) + 0.8 * (index + 0.5) / len(names) - 0.4
            marker = "s" if name in exact else "o"
            axis.errorbar(at, row["mean"], yerr=row["std"], fmt=marker, markersize=4, linewidth=1.5, label=name)
        axis.set_title(title)
        axis.set_ylabel("standard deviations\nof the reference")
        axis.legend(fontsize=8, ncol=4, loc="upper right")
    axes[0].set_ylim(-2, 2.6)
    names = ["intercept", *(str(name).removeprefix("mean ") for name in load_breast_cancer().feature_names[:10])]
    axes[1].set_xticks(range(len(names)), names, rotation=20)
    figure.tight_layout()
    figure.savefig(directory / f"{NAME}.png", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    keep(NAME, run)
