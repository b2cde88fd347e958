"""a-GPS: draws from a proposal that uses the posterior's score, without a test (agps, Algorithms 1, 3 and 4).

With s = -grad U(theta_t) / T, elementwise (Algorithm 1, eqs 3 and 7):

    sigma^2 = |theta_t - mu_t| / |s|
    mu_{t+1} = theta_t + sigma^2 s                       with the uncapped variance: theta_t +- |theta_t - mu_t|
    theta_{t+1} ~ N(mu_{t+1}, min(sigma, lambda)^2)      lambda caps the standard deviation

mu_1 is the start, best a MAP (``warm_start_steps``), and theta_1 ~ N(mu_1, lambda^2). ``family`` selects the proposal:
gamma on theta > 0 (Algorithm 3) and beta on (0, 1) (Algorithm 4) carry both of their parameters instead of mu.

Stationary law: exp(-U / T) if its coordinates are independent and belong to the family. mu converges as 1 / t, while
sigma^2 is heavy-tailed, so burn-in needs a hundred updates or more. Otherwise no law is known: a-GPS finds several
modes, but it does not weigh them correctly. ``mcmc/gps.py`` is exact.

With minibatches, the noise of s dominates |theta - mu| / |s|: on N(2, 4), noise of 10 % of the score's standard
deviation makes the variance 5.2. Then the cap is the width of the draws. The share of capped coordinates is reported.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.compat import standard_gamma
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.diagnostics.verdict import MAX_CAPPED
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import grad_energy


class Parameters(NamedTuple):
    """The parameters of a proposal, [M, d] each: mu and sigma (Gaussian), or alpha and beta (gamma, beta)."""

    first: Tensor
    second: Tensor


class Family(Protocol):
    """A family of distributions on the real line, from which each coordinate of a proposal is drawn."""

    def start(self, theta: Tensor, max_std: float) -> Parameters:
        """Return the first proposal, for a chain at ``theta``."""
        ...

    def match(self, theta: Tensor, score: Tensor, carried: Parameters, max_std: float) -> Parameters:
        """Return the proposal after ``carried``, given the score at theta."""
        ...

    def fit(self, mean: Tensor, variance: Tensor) -> Parameters:
        """Return the parameters with these moments."""
        ...

    def first_variance(self, mean: Tensor) -> Tensor:
        """Return a wide guess of the variance, for ``fit`` where only a point is known."""
        ...

    def draw(self, rngs: Rngs, at: Parameters) -> Tensor:
        """Return one draw [M, d] per chain."""
        ...

    def log_prob(self, theta: Tensor, at: Parameters) -> Tensor:
        """Return the log density [M, d]; -inf outside the support."""
        ...

    def contains(self, theta: Tensor) -> Tensor:
        """Return a mask [M, d], True for coordinates inside the support."""
        ...


class GaussianFamily:
    """Gaussian proposals (Algorithm 1)."""

    def start(self, theta: Tensor, max_std: float) -> Parameters:
        return Parameters(theta, torch.full_like(theta, max_std))

    def match(self, theta: Tensor, score: Tensor, carried: Parameters, max_std: float) -> Parameters:
        distance = (theta - carried.first).abs()
        # if rounding makes theta = mu, a variance of 0 would hold the coordinate there for ever
        variance = torch.where(distance > 0, distance / score.abs(), torch.inf)
        mean = theta + score.sign() * distance  # eq. 19: finite where the score is 0
        return Parameters(mean, variance.sqrt().clamp(max=max_std))

    def fit(self, mean: Tensor, variance: Tensor) -> Parameters:
        return Parameters(mean, variance.sqrt())

    def first_variance(self, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def draw(self, rngs: Rngs, at: Parameters) -> Tensor:
        return at.first + at.second * randn(rngs, at.first)

    def log_prob(self, theta: Tensor, at: Parameters) -> Tensor:
        density: Tensor = torch.distributions.Normal(at.first, at.second, validate_args=False).log_prob(theta)
        return density

    def contains(self, theta: Tensor) -> Tensor:
        return torch.ones_like(theta, dtype=torch.bool)


class GammaFamily:
    """Gamma proposals on theta > 0 (Algorithm 3, eq. 37). The first one is Gamma(1, 1); there is no cap."""

    def start(self, theta: Tensor, max_std: float) -> Parameters:
        return Parameters(torch.ones_like(theta), torch.ones_like(theta))

    def match(self, theta: Tensor, score: Tensor, carried: Parameters, max_std: float) -> Parameters:
        alpha, beta = carried
        return _positive(((score + beta) * theta + 1).abs(), ((alpha - 1) / theta - score).abs())

    def fit(self, mean: Tensor, variance: Tensor) -> Parameters:
        return _positive(mean.square() / variance, mean / variance)

    def first_variance(self, mean: Tensor) -> Tensor:
        return mean.square()

    def draw(self, rngs: Rngs, at: Parameters) -> Tensor:
        tiny = torch.finfo(at.first.dtype).tiny
        return (_standard_gamma(rngs, at.first) / at.second).clamp_min(tiny)

    def log_prob(self, theta: Tensor, at: Parameters) -> Tensor:
        density = torch.distributions.Gamma(at.first, at.second, validate_args=False).log_prob(theta.clamp_min(0))
        return torch.where(self.contains(theta), density, -torch.inf)

    def contains(self, theta: Tensor) -> Tensor:
        return theta > 0


class BetaFamily:
    """Beta proposals on (0, 1) (Algorithm 4, eq. 39). The first one is uniform; there is no cap."""

    def start(self, theta: Tensor, max_std: float) -> Parameters:
        return Parameters(torch.ones_like(theta), torch.ones_like(theta))

    def match(self, theta: Tensor, score: Tensor, carried: Parameters, max_std: float) -> Parameters:
        alpha, beta = carried
        return _positive(
            ((score + (beta - 1) / (1 - theta)) * theta + 1).abs(),
            (1 - (score - (alpha - 1) / theta) * (1 - theta)).abs(),
        )

    def fit(self, mean: Tensor, variance: Tensor) -> Parameters:
        total = mean * (1 - mean) / variance - 1
        return _positive(mean * total, (1 - mean) * total)

    def first_variance(self, mean: Tensor) -> Tensor:
        return mean * (1 - mean) / 3

    def draw(self, rngs: Rngs, at: Parameters) -> Tensor:
        one, other = _standard_gamma(rngs, at.first), _standard_gamma(rngs, at.second)
        eps = torch.finfo(at.first.dtype).eps
        return (one / (one + other)).nan_to_num(0.5).clamp(eps, 1 - eps)

    def log_prob(self, theta: Tensor, at: Parameters) -> Tensor:
        inside = self.contains(theta)
        at_inside = torch.where(inside, theta, 0.5)
        density = torch.distributions.Beta(at.first, at.second, validate_args=False).log_prob(at_inside)
        return torch.where(inside, density, -torch.inf)

    def contains(self, theta: Tensor) -> Tensor:
        return (theta > 0) & (theta < 1)


FAMILIES: dict[str, Family] = {"gaussian": GaussianFamily(), "gamma": GammaFamily(), "beta": BetaFamily()}


class AGPSState(NamedTuple):
    """The position, the proposal that it was drawn from, and the share of capped coordinates."""

    theta: Tensor
    """[M, d]"""
    first: Tensor
    """[M, d] mu (or alpha) of this proposal."""
    second: Tensor
    """[M, d] sigma (or beta) of this proposal."""
    capped: Tensor
    """[M] sum, over the updates after burn-in, of the share of coordinates at the cap."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class AGPSConfig(MethodConfig):
    """The approximate Gaussian (or gamma, or beta) proposal sampler: one gradient and one draw an update.

    Attributes:
        max_std: lambda, the largest standard deviation of a proposal in parameter units; None takes the learning_rate
            of each update. With minibatches it is the width of the posterior's draws.
        family: family of the proposal: "gaussian"; "gamma" for parameters > 0, "beta" for parameters in (0, 1).
    """

    name: ClassVar[str] = "agps"
    max_std: float | None = None
    family: Literal["gaussian", "gamma", "beta"] = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError(
                f"{self.name}: temperature must be > 0, got {self.temperature}: a proposal of width 0 stays where it "
                'is. Use method="map" to optimise'
            )
        if self.max_std is not None:
            self._check_number("max_std", self.max_std, minimum=0.0, strict=True)
        self._check_choice("family", self.family, tuple(FAMILIES))

    @property
    def requirements(self) -> Requirements:
        if self.max_std is None:
            return Requirements()
        return Requirements(learning_rate="unused", follows_schedule=False)

    def build(self, problem: Problem) -> Rule[AGPSState]:
        family = FAMILIES[self.family]

        def init(theta: Tensor, rngs: Rngs) -> AGPSState:
            check_support(self.name, self.family, theta)
            at = family.start(theta, self.max_std or problem.learning_rate)
            drawn = family.draw(rngs, at) if self.family == "gaussian" else theta
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return AGPSState(drawn, *at, torch.zeros(len(theta), dtype=theta.dtype, device=theta.device), step)

        def update(state: AGPSState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[AGPSState, Info]:
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            max_std = self.max_std or lr

            def match(gradient: Tensor, theta: Tensor, *carried: Tensor) -> Parameters:
                return family.match(theta, -gradient / self.temperature, Parameters(*carried), max_std)

            at = Parameters(*in_blocks(match, gradient, state.theta, state.first, state.second))
            capped = state.capped
            info: Info = {}
            if self.family == "gaussian":
                share = (at.second >= max_std).to(capped.dtype).mean(1)
                capped = capped + share * (state.step >= problem.burn_in)
                info = {"proposal_std": at.second.mean(1), "capped": share}
            return AGPSState(family.draw(rngs, at), *at, capped, state.step + 1), info

        def finish(state: AGPSState, draws: Tensor) -> Draws:
            share = float((state.capped / (state.step - problem.burn_in).clamp_min(1)).mean())
            if share > MAX_CAPPED:
                width = "learning_rate" if self.max_std is None else f"max_std={self.max_std:g}"
                warnings.warn(
                    f"{self.name}: {share:.0%} of the coordinates were at the cap of the proposal's standard deviation "
                    f"({width}): the data do not set the width of these draws, the cap does. This is usual with "
                    "minibatches; choose the cap by held-out likelihood",
                    stacklevel=2,
                )
            return Draws.from_chains(draws)

        return Rule(init, locate_at_theta, update, finish)


def check_support(name: str, family: str, theta: Tensor) -> None:
    """Raise a ValueError for a start outside the family's support."""
    upper = {"gaussian": None, "gamma": torch.inf, "beta": 1.0}[family]
    if upper is not None and not bool(((theta > 0) & (theta < upper)).all()):
        raise ValueError(
            f"{name}: family={family!r} needs every parameter within (0, {upper:g}), got a start from "
            f"{theta.min().item():g} to {theta.max().item():g}: start inside, or use family='gaussian'"
        )


def _positive(alpha: Tensor, beta: Tensor) -> Parameters:
    """Return the parameters, kept away from 0, where there is no distribution."""
    tiny = torch.finfo(alpha.dtype).eps
    return Parameters(alpha.clamp_min(tiny), beta.clamp_min(tiny))


def _standard_gamma(rngs: Rngs, alpha: Tensor) -> Tensor:
    """Return draws [M, d] of Gamma(alpha, 1), row m from generator m."""
    return torch.stack([standard_gamma(row, generator=rng) for row, rng in zip(alpha, rngs, strict=True)])
