"""The targets on a line of ``agps_targets``: mixtures with energy, distribution function and independent draws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor
from torch.distributions import Beta, Distribution, Gamma, Gumbel, Normal, StudentT, biject_to, constraints

from hf_bayes.core.rng import generator

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
