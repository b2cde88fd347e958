"""a-GPS and the exact GPS kernel on targets on a line, against NUTS and MALA (agps section 3.1, Table 1, Figures 1-8).

    python -m scripts.reproduce.agps_targets

The table has time and effective sample size as in Table 1, and also the distance of the draws from the target. The
baselines are Pyro's (``pip install "hf-bayes[reproduce]"``), as in the paper. They run on an unconstrained coordinate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor
from torch.distributions import Beta, Distribution, Gamma, Gumbel, Normal, StudentT, biject_to, constraints

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from scripts.reproduce.report import keep, spread, table

NAME = "agps_targets"
SUPPORTS = {"gaussian": constraints.real, "gamma": constraints.positive, "beta": constraints.unit_interval}


class Component(NamedTuple):
    """One distribution, in torch for gradients and in scipy for its distribution function."""

    density: Distribution
    exact: Any
    """The frozen distribution of scipy."""


def normal(mean: float, std: float) -> Component:
    """Return N(mean, std^2)."""
    return Component(Normal(_number(mean), _number(std), validate_args=False), stats.norm(mean, std))


def student(loc: float, scale: float, df: float) -> Component:
    """Return Student's t with a location and a scale."""
    return Component(StudentT(_number(df), _number(loc), _number(scale), validate_args=False), stats.t(df, loc, scale))


def gumbel(loc: float, scale: float) -> Component:
    """Return Gumbel's distribution of maxima."""
    return Component(Gumbel(_number(loc), _number(scale), validate_args=False), stats.gumbel_r(loc, scale))


def gamma(shape: float, rate: float) -> Component:
    """Return the gamma distribution with mean shape / rate."""
    return Component(Gamma(_number(shape), _number(rate), validate_args=False), stats.gamma(shape, scale=1 / rate))


def beta(first: float, second: float) -> Component:
    """Return the beta distribution on (0, 1) with mean first / (first + second)."""
    return Component(Beta(_number(first), _number(second), validate_args=False), stats.beta(first, second))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Target:
    """An equally weighted mixture on a line.

    Attributes:
        components: the components of the mixture.
        family: the family of the proposal.
        max_std: lambda, the cap of a Gaussian proposal.
        figure: the figure of the paper with this target.
        compared: True if the paper compares NUTS and MALA on it (Table 1).
    """

    components: tuple[Component, ...]
    family: str
    figure: str
    max_std: float = 10.0
    compared: bool = False

    def energy(self, theta: Tensor, batch: object = None) -> Tensor:
        """Return U [M] of theta [M, 1]; infinite outside the support."""
        inside = SUPPORTS[self.family].check(theta)
        at = torch.where(inside, theta, 0.5)
        logs = torch.stack([part.density.log_prob(at) for part in self.components])
        return -torch.where(inside, logs.logsumexp(0) - np.log(len(logs)), -torch.inf).squeeze(1)

    def unconstrained_energy(self, z: Tensor) -> Tensor:
        """Return U [M] of Pyro's coordinate [M, 1]: log x or logit x if the support is bounded."""
        transform = biject_to(SUPPORTS[self.family])
        theta = transform(z)
        return self.energy(theta) - transform.log_abs_det_jacobian(z, theta).squeeze(1)

    def start(self, num_chains: int, seed: int) -> Tensor:
        """Return starts [num_chains, 1] as in Algorithms 1, 3 and 4: from N(0, 1) or Gamma(1, 1), or at 1/2."""
        rng = generator(seed, "start")
        if self.family == "gaussian":
            return torch.randn(num_chains, 1, dtype=torch.float64, generator=rng)
        if self.family == "gamma":
            return torch.empty(num_chains, 1, dtype=torch.float64).exponential_(generator=rng)
        return torch.full((num_chains, 1), 0.5, dtype=torch.float64)

    def cdf(self, x: np.ndarray) -> np.ndarray:
        return np.mean([part.exact.cdf(x) for part in self.components], 0)

    def draw(self, shape: tuple[int, int], seed: int) -> Tensor:
        """Return independent draws."""
        rng = np.random.default_rng(seed)
        each = np.stack([part.exact.rvs(shape, random_state=rng) for part in self.components])
        chosen = rng.integers(len(self.components), size=shape)
        return torch.from_numpy(np.take_along_axis(each, chosen[None], 0)[0])

    def quantile(self, probability: float) -> float:
        ends = [part.exact.ppf(probability) for part in self.components]
        if len(ends) == 1:
            return float(ends[0])
        return float(brentq(lambda x: self.cdf(x) - probability, min(ends), max(ends), xtol=1e-12))

    @cached_property
    def central(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return [G] points over the central 99 %, the distribution function there, and the interquartile range."""
        grid = np.linspace(self.quantile(0.005), self.quantile(0.995), 4001)
        return grid, self.cdf(grid), self.quantile(0.75) - self.quantile(0.25)

    def distances(self, values: np.ndarray) -> dict[str, float]:
        """Return the distances of [S] draws: Kolmogorov-Smirnov, and Wasserstein-1 clipped to the central 99 %.

        Wasserstein-1 is in interquartile ranges of the target. It is clipped because the mixture has Cauchy tails,
        from which every sample's Wasserstein-1 is infinite.
        """
        grid, exact, width = self.central
        empirical = np.searchsorted(np.sort(values), grid, side="right") / len(values)
        return {
            "ks": float(stats.kstest(values, self.cdf).statistic),
            "wasserstein": float(np.trapezoid(np.abs(empirical - exact), grid) / width),
        }


TARGETS = {
    "N(2, 4)": Target((normal(2.0, 2.0),), "gaussian", "Table 1, Figures 1, 2", compared=True),
    "mixture": Target(
        (student(3.0, 0.2, 1.0), gumbel(1.0, 0.6), gumbel(5.0, 2.0), student(6.0, 1.0, 1.0)),
        "gaussian",
        "Table 1, Figure 2",
        max_std=3.0,
        compared=True,
    ),
    "Gamma(2, 0.1)": Target((gamma(2.0, 0.1),), "gamma", "Figure 3"),
    "two gammas": Target((gamma(2.0, 1.0), gamma(30.0, 3.0)), "gamma", "Figure 4"),
    "two normals": Target((normal(5.0, 1.0), normal(12.0, 2.0)), "gamma", "Figure 5"),
    "Beta(5, 5)": Target((beta(5.0, 5.0),), "beta", "Figure 6"),
    "two betas": Target((beta(3.0, 12.0), beta(12.0, 3.0)), "beta", "Figure 7"),
    "Beta(0.5, 0.5)": Target((beta(0.5, 0.5),), "beta", "Figure 8"),
}
"""The paper does not say which mixtures Figures 4, 5 and 7 show; these are ours."""


class Found(NamedTuple):
    """Draws [R, S] of R replications, and the processor seconds of single replications."""

    draws: Tensor
    seconds: list[float]


def ours(config: Callable[[Target], MethodConfig], burn_in: int) -> Callable[[Target, int, int, int], Found]:
    """Return our sampler's draws. All replications are chains of one run. The time is for one chain alone."""

    def found(target: Target, replications: int, num_draws: int, timed: int) -> Found:
        def draws(num_chains: int, seed: int) -> Tensor:
            return sample(
                target.energy,
                target.start(num_chains, seed),
                config(target),
                num_steps=burn_in + num_draws,
                learning_rate=1.0,
                burn_in=burn_in,
                seed=seed,
            ).draws.squeeze(2)

        seconds = [_timed(lambda seed=seed: draws(1, seed))[1] for seed in range(timed)]
        return Found(draws(replications, 0), seconds)

    return found


def pyro_kernel(make: Callable[[Any, Callable[..., Tensor]], Any], burn_in: int) -> Callable[..., Found]:
    """Return a function that runs one of Pyro's kernels, one replication after another."""

    def found(target: Target, replications: int, num_draws: int, timed: int) -> Found:
        pyro = pyro_or_words()

        def draws(seed: int) -> Tensor:
            pyro.set_rng_seed(seed)
            start = biject_to(SUPPORTS[target.family]).inv(target.start(1, seed))
            kernel = make(pyro.infer, lambda sites: target.unconstrained_energy(sites["z"]).sum())
            run = pyro.infer.MCMC(
                kernel,
                num_samples=num_draws,
                warmup_steps=burn_in,
                initial_params={"z": start},
                disable_progbar=True,
            )
            run.run()
            return biject_to(SUPPORTS[target.family])(run.get_samples()["z"]).flatten()

        values, seconds = zip(*[_timed(lambda seed=seed: draws(seed)) for seed in range(timed)], strict=True)
        return Found(torch.stack(values), list(seconds))

    return found


def independent(target: Target, replications: int, num_draws: int, timed: int) -> Found:
    """Return draws of the target itself, the noise floor."""
    return Found(target.draw((replications, num_draws), 0), [])


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Return a result and its processor seconds. The wall clock would include other programs on the same cores."""
    begin = time.process_time()
    made = work()
    return made, time.process_time() - begin


def pyro_or_words() -> Any:
    """Return Pyro, or raise an error that names the package to install."""
    try:
        import pyro
        import pyro.infer
    except ImportError as error:
        raise ImportError(
            'NUTS and MALA are Pyro\'s, which is not installed: pip install "hf-bayes[reproduce]" (pyro-ppl), or run '
            "scripts.reproduce.agps_targets with --baselines 0, without them"
        ) from error
    return pyro


def methods(burn_in: int) -> dict[str, Callable[[Target, int, int, int], Found]]:
    """Return name -> function that makes draws. In the paper a-GPS has no burn-in."""
    return {
        "a-GPS": ours(lambda target: AGPSConfig(family=target.family, max_std=target.max_std), 0),
        "GPS, exact": ours(lambda target: GPSConfig(family=target.family, max_std=target.max_std), burn_in),
        "NUTS": pyro_kernel(lambda infer, energy: infer.NUTS(potential_fn=energy), burn_in),
        "MALA": pyro_kernel(
            lambda infer, energy: infer.HMC(
                potential_fn=energy, step_size=1, trajectory_length=1, target_accept_prob=0.7
            ),
            burn_in,
        ),
        "independent draws": independent,
    }


def run(*, num_draws: int = 1000, burn_in: int = 1000, replications: int = 40, baselines: int = 10) -> dict[str, Any]:
    """Run every method on every target: ``baselines`` replications of Pyro's (0: none), as many timed runs of ours."""
    if baselines:
        pyro_or_words()  # a missing package is better found now than after ten minutes
    targets: dict[str, Any] = {}
    for name, target in TARGETS.items():
        targets[name] = {"figure": target.figure, "family": target.family, "methods": {}}
        low, high = target.quantile(0.01), target.quantile(0.99)
        edges = np.linspace(low, high, 61)
        for method, find in methods(burn_in).items():
            if method in ("NUTS", "MALA") and not (baselines and target.compared):
                continue
            draws, seconds = find(target, replications, num_draws, max(1, baselines) if target.compared else 0)
            each = [target.distances(row) for row in draws.numpy()]
            targets[name]["methods"][method] = {
                "replications": len(draws),
                "seconds": seconds,
                # not defined (NaN) for a chain that never moved: its draws are worth no draw of the target
                "ess": [float(ess(row[None, :, None]).nan_to_num(0.0)) for row in draws],
                "ks": [row["ks"] for row in each],
                "wasserstein": [row["wasserstein"] for row in each],
                "pooled": target.distances(draws.flatten().numpy()),
                "histogram": (np.histogram(draws, edges)[0] / draws.numel()).round(5).tolist(),
            }
        targets[name]["edges"] = [low, high]
        targets[name]["mass"] = np.diff(target.cdf(edges)).round(5).tolist()
    return {"num_draws": num_draws, "burn_in": burn_in, "targets": targets}


PAPER = {"N(2, 4)": {"NUTS": (4.6, 364), "MALA": (2.3, 74.9), "a-GPS": (0.4, 954)}} | {
    "mixture": {"NUTS": (30.0, 105.2), "MALA": (4.9, 36.8), "a-GPS": (2.0, 70.2)}
}
"""Table 1: seconds for burn-in and 1000 draws, ESS of 1000 draws."""


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables: Table 1 beside the paper's numbers, and all further targets."""
    columns = ["target", "method", "runs", "CPU s", "paper", "ESS", "paper", "ESS / s", "KS", "KS, pooled"]
    columns += ["W1", "W1, pooled"]
    only_table1 = ("CPU s", "paper", "ESS / s")
    first, second = [], []
    for name, target in record["targets"].items():
        for method, row in target["methods"].items():
            seconds, size = np.mean(row["seconds"]) if row["seconds"] else None, spread(row["ess"], 0)
            paper = PAPER.get(name, {}).get(method, ("", ""))
            speed = "" if seconds is None else f"{np.mean(row['ess']) / seconds:.0f}"
            timed = "" if seconds is None else f"{seconds:.2f}"
            distances = [spread(row["ks"]), f"{row['pooled']['ks']:.3f}"]
            distances += [spread(row["wasserstein"]), f"{row['pooled']['wasserstein']:.3f}"]
            line = [name, method, row["replications"], timed, paper[0], size, paper[1], speed, *distances]
            if name in PAPER:
                first.append(line)
            else:
                second.append([cell for column, cell in zip(columns, line, strict=True) if column not in only_table1])
    return {
        "table1": table(columns, first),
        "others": table([column for column in columns if column not in only_table1], second),
    }


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the densities and the draws of all replications."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(16, 7))
    colours = {"a-GPS": "tab:red", "GPS, exact": "tab:blue", "NUTS": "tab:green"}
    for axis, (name, target) in zip(axes.flat, record["targets"].items(), strict=True):
        edges = np.linspace(*target["edges"], len(target["mass"]) + 1)
        width = edges[1] - edges[0]
        axis.stairs(np.array(target["mass"]) / width, edges, fill=True, color="0.85", label="target")
        for method, colour in colours.items():
            if method in target["methods"]:
                row = target["methods"][method]
                label = f"{method}: KS {row['pooled']['ks']:.3f}"
                axis.stairs(np.array(row["histogram"]) / width, edges, color=colour, label=label, linewidth=1.2)
        axis.set_title(f"{name}, {target['family']} proposals ({target['figure']})", fontsize=9)
        axis.set_yticks([])
        axis.legend(fontsize=8)
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(directory / f"{NAME}.png", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baselines", type=int, default=10, help="replications of NUTS and MALA; 0 leaves them out")
    keep(NAME, lambda: run(baselines=parser.parse_args().baselines))
