"""Bayesian logistic regression with every method of ``sample``, against NUTS (posteriors app. G, Table 3).

    python -m scripts.reproduce.logistic_regression

p(y = 1 | x, w) = sigmoid(w^T x), w ~ N(0, I), on the ten mean features of scikit-learn's breast cancer data,
standardised, and an intercept: 569 rows, 11 weights. The runs use the full batch and batches of 32. The kernel Stein
discrepancy is as in Table 3. Long Hamiltonian Monte Carlo is the reference for means and standard deviations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import softplus

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, require_converged
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from scripts.reproduce.agps_targets import pyro_or_words
from scripts.reproduce.report import keep, spread, table

NAME = "logistic_regression"
BATCH = 32
Energy = Callable[[Tensor, Any], Tensor]


class Rows(NamedTuple):
    """The rows of the data: x [N, d] with a column of ones, y [N] of 0 and 1."""

    x: Tensor
    y: Tensor

    def energy(self, theta: Tensor, picked: Tensor | None) -> Tensor:
        """Return U [M] of theta [M, d]. ``picked`` [M, B] are the rows of each chain; None means all rows."""
        x, y = (self.x, self.y) if picked is None else (self.x[picked], self.y[picked])
        logits = (x @ theta[..., None]).squeeze(-1) if picked is not None else theta @ x.T
        weight = 1.0 if picked is None else len(self.x) / picked.shape[1]
        return weight * (softplus(logits) - y * logits).sum(1) + 0.5 * theta.square().sum(1)

    def batches(self, num_chains: int) -> Callable[[], Iterator[Tensor]]:
        """Return passes over the data: [num_chains, BATCH] rows, in a separate order for each chain."""
        rng = generator("order")

        def one_pass() -> Iterator[Tensor]:
            order = torch.stack([torch.randperm(len(self.x), generator=rng) for _ in range(num_chains)])
            return iter(order[:, : len(self.x) // BATCH * BATCH].split(BATCH, 1))

        return one_pass


def breast_cancer() -> Rows:
    """Return the ten mean features of 357 benign (y = 1) and 212 malignant tumours."""
    data = load_breast_cancer()
    x = torch.from_numpy(StandardScaler().fit_transform(data.data[:, :10]))
    return Rows(torch.cat([torch.ones(len(x), 1), x], 1), torch.from_numpy(data.target).double())


def pyro_model(rows: Rows) -> Callable[..., None]:
    """Return the model in Pyro. ``picked`` [B] are the rows of a minibatch, which the plate scales up."""
    pyro = pyro_or_words()

    def model(picked: Tensor | None = None) -> None:
        prior = pyro.distributions.Normal(rows.x.new_zeros(rows.x.shape[1]), 1.0).to_event(1)
        weights = pyro.sample("weights", prior)
        with pyro.plate("rows", len(rows.x), subsample=picked) as at:
            pyro.sample("label", pyro.distributions.Bernoulli(logits=rows.x[at] @ weights), obs=rows.y[at])

    return model


def pyro_energy(rows: Rows) -> Energy:
    """Return the same U from a Pyro model: minus the log density of its trace, for every chain and its minibatch."""
    pyro, model = pyro_or_words(), pyro_model(rows)

    def log_density(weights: Tensor, picked: Tensor | None) -> Tensor:
        conditioned = pyro.poutine.condition(model, data={"weights": weights})
        return pyro.poutine.trace(conditioned).get_trace(picked).log_prob_sum()

    def energy(theta: Tensor, picked: Tensor | None) -> Tensor:
        with pyro.validation_enabled(False):  # the checks of Pyro read values, which vmap hides
            return -torch.vmap(log_density, in_dims=(0, None if picked is None else 0))(theta, picked)

    return energy


# ------------------------------------------------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Plan:
    """The settings of ``sample`` for a method.

    Attributes:
        method: the config of the method.
        learning_rate: step size.
        updates: updates of each chain. The first fifth is burn-in.
        batched: True for batches of 32 rows.
    """

    method: MethodConfig
    learning_rate: float
    updates: int
    batched: bool = False

    def run(self, rows: Rows, num_chains: int, num_draws: int, energy: Energy | None = None) -> SampleResult:
        """Run chains from N(0, 0.1^2). A chain is a seed of Table 3."""
        dim = rows.x.shape[1]
        starts = 0.1 * torch.randn(num_chains, dim, dtype=torch.float64, generator=generator("starts"))
        thin = max(1, (self.updates - self.updates // 5) // num_draws)
        return sample(
            energy or rows.energy,
            starts,
            self.method,
            num_steps=self.updates,
            learning_rate=self.learning_rate,
            num_data=len(rows.x),
            batches=rows.batches(num_chains) if self.batched else None,
            burn_in=self.updates - thin * num_draws,
            thin=thin,
        )


def plans(updates: int, batched_updates: int, kernel_updates: int) -> dict[str, Plan]:
    """Return the plans. Step sizes follow from the largest curvature, 81: see the page."""
    start = {"warm_start_steps": updates // 10, "warm_start_learning_rate": 0.02}
    sgld = SGLDConfig(**start)
    samplers = {"sghmc": SGHMCConfig(**start), "baoab": BAOABConfig(**start), "sgnht": SGNHTConfig(**start)}
    full = {name: Plan(config, 1.0, updates) for name, config in samplers.items()}
    batched = {name: Plan(config, 0.05, batched_updates, batched=True) for name, config in samplers.items()}
    return {
        "hmc": Plan(HMCConfig(), 0.1, kernel_updates),
        "sgld": Plan(sgld, 1.0, 5 * updates),  # without momentum the autocorrelation time is ten times as long
        **full,
        "mean_field": Plan(MeanFieldConfig(num_draws=1), 0.01, updates // 4),
        "sgld, batch 32": Plan(sgld, 0.5, batched_updates, batched=True),
        **{f"{name}, batch 32": plan for name, plan in batched.items()},
        "mean_field, batch 32": Plan(MeanFieldConfig(num_draws=1), 0.01, updates // 4, batched=True),
    }


def draws_of(result: SampleResult, num_draws: int) -> Tensor:
    """Return [M, num_draws, d]: the draws of the run, or draws from each chain's Gaussian."""
    if not isinstance(result.approximation, Gaussian):
        return result.draws
    gaussian, noise = result.approximation, generator("gaussian")
    eps = torch.randn(len(gaussian.means), num_draws, gaussian.means.shape[1], dtype=torch.float64, generator=noise)
    return gaussian.means[:, None] + gaussian.stds[:, None] * eps


def laplace(rows: Rows, num_chains: int, num_draws: int, updates: int) -> Tensor:
    """Return [num_chains, num_draws, d] from N(MAP, (Hessian of U)^-1), with the MAP found by ``sample``."""
    found = Plan(MAPConfig(), 0.01, updates).run(rows, 1, 1).draws[0, -1]
    hessian = torch.func.hessian(lambda theta: rows.energy(theta[None], None)[0])(found)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian))
    eps = torch.randn(num_chains, num_draws, len(found), dtype=torch.float64, generator=generator("laplace"))
    return found + eps @ factor.T


def nuts(rows: Rows, num_chains: int, num_draws: int, warmup: int) -> Tensor:
    """Return [num_chains, num_draws, d] of Pyro's NUTS on the Pyro model, seed by seed."""
    pyro, model = pyro_or_words(), pyro_model(rows)
    chains = []
    for seed in range(num_chains):
        pyro.set_rng_seed(seed)
        kernel = pyro.infer.NUTS(model, jit_compile=True, ignore_jit_warnings=True)
        run = pyro.infer.MCMC(kernel, num_samples=num_draws, warmup_steps=warmup, disable_progbar=True)
        run.run()
        chains.append(run.get_samples()["weights"])
    return torch.stack(chains)


# ------------------------------------------------------------------------------------------------------------ metrics


def stein_discrepancy(theta: Tensor, score: Tensor) -> float:
    """Return the kernel Stein discrepancy with k = (1 + |x - y|^2 / d)^(-1/2) (Gorham and Mackey 2017).

    k is the inverse multiquadric. KSD^2 = mean over all pairs, including equal indices, of

        k s_x.s_y + (x - y).(s_y - s_x) 2 k' - 2 d k' - 4 k'' |x - y|^2,     k', k'' by |x - y|^2

    with s = grad log p. It is 0 only in the limit of draws from p. S independent draws have E KSD^2 = E[k_p(x, x)] / S
    = (E|s|^2 + 1) / S. Coordinates must have unit scale, because the kernel is isotropic.

    Args:
        theta: [S, d].
        score: [S, d] grad log p at theta.
    """
    dim = theta.shape[1]
    distance = torch.cdist(theta, theta).square()
    base = 1 + distance / dim
    kernel, first, second = base**-0.5, -0.5 * base**-1.5 / dim, 0.75 * base**-2.5 / dim**2
    projected = theta @ score.T  # [i, j] = x_i . s_j
    own = projected.diagonal()
    # (x_i - x_j).(s_j - s_i)
    mixed = projected + projected.T - own - own[:, None]
    terms = kernel * (score @ score.T) + 2 * first * mixed - 2 * dim * first - 4 * second * distance
    return math.sqrt(max(0.0, float(terms.mean())))


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
        pyro_or_words()  # a missing package is better found now than after ten minutes
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


# --------------------------------------------------------------------------------------------------------------- page

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
