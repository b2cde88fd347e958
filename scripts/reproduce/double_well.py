"""Deep ensemble, serial and parallel SGHMC on the double well (posteriors Figure 2), with distances to the target.

    python -m scripts.reproduce.double_well

The figure shows the density exp(-U) of two coordinates with

    U(theta) = sum_i theta_i^4 / 10 - theta_i^2

whose four wells have equal weights. A second target adds sum_i theta_i / 4 to U, so that the weights differ. U is a
sum over coordinates. Therefore a quadrature on a line gives the weights of wells, marginals and cells of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from scripts.reproduce.report import keep, spread, table

NAME = "double_well"
TILTS = {"Figure 2": 0.0, "tilted": 0.25}
SGHMC = SGHMCConfig(momentum=0.95)
STEP = 0.0025
"""The learning rate. With momentum 0.95 the friction is 1 and the step h is 0.05, as in an example of the posteriors
package. The law then holds to 0.3 % of a variance in a well."""
LIMIT = 5.0
"""The end of the grid. The mass beyond it is 0 in float64: U(5) - U(sqrt 5) = 40."""


@dataclass(frozen=True)
class Budget:
    """The settings of a run of a method.

    Attributes:
        method: the config of the method.
        chains: M, the number of chains, started from N(0, I).
        updates: updates of each chain.
        kept: draws of each chain, spread evenly over the second half of its updates. 1 keeps the last state.
        learning_rate: step size.
    """

    method: MethodConfig
    chains: int
    updates: int
    kept: int = 1
    learning_rate: float = STEP


def budgets(num_draws: int, updates: int) -> dict[str, Budget]:
    """Return runs of ``num_draws`` draws with ``updates`` updates in each parallel chain, a fifth, and ten times."""
    return {
        "deep ensemble": Budget(EnsembleConfig(), num_draws, updates, learning_rate=0.02),
        "serial SGHMC": Budget(SGHMC, 1, updates, num_draws),
        "serial SGHMC, long": Budget(SGHMC, 1, 10 * updates, num_draws),
        "parallel SGHMC, short": Budget(SGHMC, num_draws, updates // 5),
        "parallel SGHMC": Budget(SGHMC, num_draws, updates),
    }


class Well:
    """The density exp(-U), by quadrature along one coordinate.

    Attributes:
        grid: the points [G].
        density: the density [G] of one coordinate at these points.
        cdf: the distribution function [G] at these points.
    """

    def __init__(self, tilt: float, num_points: int = 4001) -> None:
        self.tilt = tilt
        self.grid = torch.linspace(-LIMIT, LIMIT, num_points, dtype=torch.float64)
        weight = (-self.along(self.grid)).exp()
        self.density = weight / torch.trapezoid(weight, self.grid)
        self.cdf = torch.cat([torch.zeros(1), torch.cumulative_trapezoid(self.density, self.grid)]).double()

    def along(self, x: Tensor) -> Tensor:
        """Return U of one coordinate."""
        return x**4 / 10 - x**2 + self.tilt * x

    def energy(self, theta: Tensor, batch: object) -> Tensor:
        """Return U [M] of theta [M, 2]."""
        return self.along(theta).sum(1)

    def below(self, x: Tensor) -> Tensor:
        """Return P(theta_i < x)."""
        return self.cdf[torch.searchsorted(self.grid, x).clamp(max=len(self.grid) - 1)]

    def draw(self, num_draws: int, rng: torch.Generator) -> Tensor:
        """Return independent draws [num_draws, 2], by inversion."""
        uniform = torch.rand(num_draws, 2, dtype=torch.float64, generator=rng)
        return self.grid[torch.searchsorted(self.cdf, uniform).clamp(max=len(self.grid) - 1)]

    def cells(self, edges: Tensor) -> Tensor:
        """Return the mass [k + 1, k + 1] of each cell between the ``edges`` [k]."""
        one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        mass = torch.cat([zero, self.below(edges), one]).diff()
        return mass[:, None] * mass

    def distances(self, draws: Tensor) -> dict[str, float]:
        """Return total variation over wells and over a grid, and mean Wasserstein-1 by coordinate, of draws [S, 2]."""
        return {
            "wells": self._total_variation(draws, torch.zeros(1, dtype=torch.float64)),
            "cells": self._total_variation(draws, torch.arange(-3.5, 3.6, 0.5, dtype=torch.float64)),
            "wasserstein": sum(self._wasserstein(column) for column in draws.T) / 2,
        }

    def _total_variation(self, draws: Tensor, edges: Tensor) -> float:
        exact = self.cells(edges)
        found = torch.zeros_like(exact)
        row, column = torch.searchsorted(edges, draws.T.contiguous())
        found.index_put_((row, column), torch.tensor(1 / len(draws)).double(), accumulate=True)
        return float((found - exact).abs().sum() / 2)

    def _wasserstein(self, values: Tensor) -> float:
        empirical = torch.searchsorted(values.sort().values, self.grid, right=True) / len(values)
        return float(torch.trapezoid((empirical - self.cdf).abs(), self.grid))


def draws_of(well: Well, budget: Budget, seed: int) -> Tensor:
    """Return the draws [chains * kept, 2] of a run."""
    starts = torch.randn(budget.chains, 2, dtype=torch.float64, generator=generator(seed, "starts"))
    half = budget.updates // 2
    thin = (budget.updates - half) // budget.kept
    result = sample(
        well.energy,
        starts,
        budget.method,
        num_steps=budget.updates,
        learning_rate=budget.learning_rate,
        burn_in=budget.updates - thin * budget.kept,
        thin=thin,
        seed=seed,
    )
    return result.draws.flatten(0, 1)


def run(*, num_draws: int = 500, updates: int = 1000, seeds: int = 5, shown: int = 150) -> dict[str, Any]:
    """Run every method on both targets."""
    laws: dict[str, Any] = {}
    for name, tilt in TILTS.items():
        well, plans = Well(tilt), budgets(num_draws, updates)
        makers: dict[str, Callable[[int], Tensor]] = {
            method: lambda seed, plan=plan, well=well: draws_of(well, plan, seed) for method, plan in plans.items()
        }
        makers["independent draws"] = lambda seed, well=well: well.draw(num_draws, generator(seed, "exact"))
        laws[name] = {}
        for method, maker in makers.items():
            found = [maker(seed) for seed in range(seeds)]
            metrics = [well.distances(draws) for draws in found]
            plan = plans.get(method)
            laws[name][method] = {
                "updates": plan.updates if plan else 0,
                "gradients": plan.updates * plan.chains if plan else 0,
                **{key: [row[key] for row in metrics] for key in metrics[0]},
                "draws": [[round(value, 2) for value in draw] for draw in _spread_evenly(found[0], shown).tolist()],
            }
    return {"num_draws": num_draws, "seeds": seeds, "laws": laws}


def _spread_evenly(draws: Tensor, count: int) -> Tensor:
    return draws[:: max(1, math.ceil(len(draws) / count))]


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page, one for each target."""
    columns = ["method", "updates", "gradients", "wells", "cells", "Wasserstein-1"]
    tables = {}
    for name, methods in record["laws"].items():
        rows = [
            [method, row["updates"] or "", row["gradients"] or ""]
            + [spread(row[key]) for key in ("wells", "cells", "wasserstein")]
            for method, row in methods.items()
        ]
        tables["figure" if name == "Figure 2" else name] = table(columns, rows)
    return tables


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the samples of seed 0 over the density."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = [method for method in next(iter(record["laws"].values())) if method != "serial SGHMC, long"]
    figure, axes = plt.subplots(len(TILTS), len(methods), figsize=(15, 6.6), sharex=True, sharey=True)
    for row, (law, tilt) in zip(axes, TILTS.items(), strict=True):
        well = Well(tilt, 401)
        density = well.density[:, None] * well.density
        for axis, method in zip(row, methods, strict=True):
            found = record["laws"][law][method]
            axis.contourf(well.grid, well.grid, density.T, levels=12, cmap="Purples")
            axis.plot(*zip(*found["draws"], strict=True), "o", color="tab:red", markersize=2.5, alpha=0.6)
            axis.set_title(
                f"{method}\nwells off by {sum(found['wells']) / len(found['wells']):.0%}, "
                f"$W_1$ {sum(found['wasserstein']) / len(found['wasserstein']):.2f}",
                fontsize=10,
            )
            axis.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
        row[0].set_ylabel("wells of one weight (Figure 2)" if tilt == 0 else "tilted: wells of different weight")
    figure.tight_layout()
    figure.savefig(directory / f"{NAME}.png", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    keep(NAME, run)
