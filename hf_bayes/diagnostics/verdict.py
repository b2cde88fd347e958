"""Did it work? Kinetic temperature, distance moved, rounding: numbers per chain and a verdict in words."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS_PER_CHAIN, rhat_by_chance
from hf_bayes.diagnostics.plausibility import has_strayed

UNKNOWN = "convergence not"
"""How complaints begin that say only that too little is known."""

MIN_DISTANCE = 1e-4
"""Prior standard deviations (RMS over coordinates) below which a chain counts as not moved. Even where a million tokens
each tell a nat per squared prior std about every coordinate, the posterior std is 1e-3."""

KINETIC_TOLERANCE = 0.1
"""Relative error of the kinetic temperature that passes although its chi-square interval excludes it: with a million
parameters that interval is +-0.4 %, and the law leaves out gradient noise and curvature."""

OUTSIDE_BY_CHANCE = 0.005
"""Probability below which tensors outside their intervals are too many for chance."""

CONFIGURATIONAL_FACTOR = 2.0
"""The configurational temperature may be off by this factor: short runs scatter, and nobody knows its variance."""

ACCEPTANCE_RANGE = (0.1, 0.99)
"""Mean acceptance outside it wastes the run: nearly all proposals refused, or steps far smaller than needed."""

MAX_UNMOVED = 0.01
"""Share of a chain's numbers that an update with noise may leave as they are; by chance it is a few in a million."""

MAX_BEYOND = 0.01
"""Share of minibatch Metropolis moves whose noise may be too large for its correction: what the posterior's width then
misses is below what few draws tell."""

MAX_CAPPED = 0.05
"""Share of an adaptive proposal's coordinates at its cap, past which the cap and not the data is the draws' width."""

MIN_NOISE_RATIO = 1.0
"""Injected variance over that of the minibatch gradient. Below it a chain is more than twice as hot as it says, unless
the sampler subtracts the gradient's."""


@functools.cache
def kinetic_temperature_interval(dim: int, temperature_law: float, *, confidence: float = 0.99) -> tuple[float, float]:
    """Where the kinetic temperature m^T M^-1 m / d of one state lies with probability c (cold_posteriors eqs 40-42).

    (T_law / d) times the quantiles (1 -+ c) / 2 of chi^2(d). The paper has T_law = T; at a finite step size
    the momentum has the variance of the discretisation instead, 2 T / (1 + beta) for SGHMC, and the interval is its.

    Args:
        dim: d, the number of coordinates the estimate is over.
        temperature_law: expected kinetic temperature.
        confidence: c.
    """
    from scipy.stats import chi2

    low, high = chi2.ppf([(1 - confidence) / 2, (1 + confidence) / 2], dim)
    return temperature_law * float(low) / dim, temperature_law * float(high) / dim


def widened_interval(dim: int, law: float, tolerance: float, *, confidence: float = 0.99) -> tuple[float, float]:
    """``kinetic_temperature_interval``, or law (1 -+ tolerance) where it is narrower."""
    low, high = kinetic_temperature_interval(dim, law, confidence=confidence)
    return min(low, (1 - tolerance) * law), max(high, (1 + tolerance) * law)


def share_within_interval(
    temperatures: Tensor,
    sizes: Sequence[int],
    temperature_law: Tensor,
    *,
    confidence: float = 0.99,
    tolerance: float = 0.0,
) -> Tensor:
    """[M]: share of the tensors of each chain whose kinetic temperature lies in its ``kinetic_temperature_interval``.

    It is the confidence itself if momenta have their law; cold_posteriors (app. I.1) compares tensor by tensor, because
    one that is too hot does not show in the mean over millions of coordinates. Means over many updates lie in the
    interval of one state more often than that.

    Args:
        temperatures: [M, S] of each chain and tensor.
        sizes: number of elements of each tensor.
        temperature_law: [M] expected.
        confidence: c.
        tolerance: relative error that passes where the interval is narrower.
    """
    bounds = {size: widened_interval(size, 1.0, tolerance, confidence=confidence) for size in set(sizes)}
    low, high = torch.tensor([bounds[size] for size in sizes]).to(temperatures).unbind(1)
    relative = temperatures / temperature_law.to(temperatures)[:, None]
    return ((low <= relative) & (relative <= high)).double().mean(1)


def distance_moved(theta: Tensor, theta0: Tensor, prior_std: Tensor | float) -> Tensor:
    """[M]: root mean square over coordinates of (theta - theta0) / prior_std; [M, d] each, ``prior_std`` broadcasts."""
    return ((theta - theta0) / prior_std).square().mean(1).sqrt()


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What a run tells about itself: one number per chain, or one for all of them. What was not measured stays None.

    Attributes:
        dim: d, coordinates of a chain.
        distance: how far each chain moved from its start (the end of a warm start), in prior standard deviations.
        strayed: ``plausibility.strayed`` of each chain: nats of prior density lost, over those accounted for.
        kinetic_temperature: of each chain, over all coordinates.
        kinetic_temperature_law: what the discretisation makes it in expectation.
        kinetic_share: ``share_within_interval`` of each chain, tensor by tensor, of means after burn-in and with
            ``KINETIC_TOLERANCE``; at least 99 % where all is well.
        kinetic_inside: the share of tensors inside their 99 % interval, update by update and without tolerance: the
            paper's E[T_K in R_99] (cold_posteriors app. I.1), over all updates after burn-in.
        num_tensors: tensors that both are a share of; at least 1.
        configurational_temperature: theta . grad U / d of each chain, mean after burn-in (cold_posteriors eq. 43).
        temperature: T, what it is in expectation.
        distance_in_noise: the distance over that which Langevin noise alone would have gone at these learning rates.
        unmoved: share of each chain's numbers that the first noisy update left as they were, by rounding.
        acceptance: mean acceptance probability of each chain after burn-in.
        penalty: mean noise penalty of each chain's minibatch Metropolis moves, in units of the log acceptance.
        beyond_series: share of each chain's minibatch Metropolis moves whose noise was too large to be corrected.
        capped: share of each chain's coordinates at the cap of an adaptive proposal's standard deviation.
        divergences: divergent trajectories (or non-finite proposals) of each chain after burn-in.
        num_moves: accept-reject moves of a chain after burn-in.
        rhat: of the probe's log-likelihood, between chains, of a single one between its halves; NaN if it could not be
            computed.
        ess: of the same, of all chains together.
        rhat_terms: of the log-probabilities of the probe's labels, one by one: the 95 % quantile over them.
        ess_terms: of the same: the 5 % quantile.
        rhat_logits: of logits of the probe's terms, those of other classes than the label among them, freed of what no
            likelihood sees (``Likelihood.identified``); of a regression, of predicted means: the 95 % quantile.
        ess_logits: of the same: the 5 % quantile.
        num_values: values of each chain that these six are of.
        values: what they are: "draws", or "looks while training", after burn-in.
        num_terms: likelihood terms of the probe that they are of.
        num_logits: logits that they are of.
        noise_ratio: variance of the sampler's own noise over that of the minibatch gradients, of each chain: the
            harmonic mean over the updates after burn-in that told it.
        ramped: whether the temperature rose from 0 in each cycle.
    """

    dim: int
    distance: Sequence[float]
    strayed: Sequence[float] | None = None
    kinetic_temperature: Sequence[float] | None = None
    kinetic_temperature_law: float | None = None
    kinetic_share: Sequence[float] | None = None
    kinetic_inside: Sequence[float] | None = None
    num_tensors: int = 1
    configurational_temperature: Sequence[float] | None = None
    temperature: float | None = None
    distance_in_noise: Sequence[float] | None = None
    unmoved: Sequence[float] | None = None
    acceptance: Sequence[float] | None = None
    penalty: Sequence[float] | None = None
    beyond_series: Sequence[float] | None = None
    capped: Sequence[float] | None = None
    divergences: Sequence[int] | None = None
    num_moves: int | None = None
    rhat: float | None = None
    ess: float | None = None
    rhat_terms: float | None = None
    ess_terms: float | None = None
    rhat_logits: float | None = None
    ess_logits: float | None = None
    num_values: int | None = None
    values: str | None = None
    num_terms: int | None = None
    num_logits: int | None = None
    noise_ratio: Sequence[float] | None = None
    ramped: bool = False

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if isinstance(values, (list, tuple)) and len(values) != self.num_chains:
                raise ValueError(
                    f"Diagnostics.{name} needs one number per chain: got {len(values)}, distance has {self.num_chains}"
                )

    @property
    def num_chains(self) -> int:
        return len(self.distance)

    @property
    def verdict(self) -> str:
        """ "converged", or what is wrong and what to do about it, the gravest first."""
        checks: tuple[Callable[[], str | None], ...] = (
            self._finite,
            self._plausible,
            self._moved,
            self._rounded,
            self._accepted,
            self._corrected,
            self._free,
            self._divergent,
            self._tempered,
            self._tempered_everywhere,
            self._settled,
            self._quiet,
            self._mixed,
            self._enough,
        )
        return "; ".join(complaint for check in checks if (complaint := check())) or "converged"

    @property
    def converged(self) -> bool | None:
        """None where nothing is wrong but too little is known to say more."""
        complaints = self.verdict.split("; ")
        return None if all(text.startswith(UNKNOWN) for text in complaints) else complaints == ["converged"]

    def summary(self) -> dict[str, Any]:
        """JSON-ready: the fields, the number of chains and the verdict; numbers that are not finite are null."""
        fields = {name: _json(value) for name, value in asdict(self).items()}
        return {**fields, "num_chains": self.num_chains, "verdict": self.verdict, "converged": self.converged}

    def _finite(self) -> str | None:
        lost = [chain for chain, distance in enumerate(self.distance) if not math.isfinite(distance)]
        return f"{_chains(lost)} not finite: lower the learning rate" if lost else None

    def _plausible(self) -> str | None:
        lost = [chain for chain, ratio in enumerate(self.strayed or []) if has_strayed(ratio)]
        if not lost or self._finite():
            return None
        return (
            f"{_chains(lost, self.num_chains)} left every place that prior and data allow (the draws lost "
            f"{max(self.strayed or []):.2g} times the nats of prior density that the data can repay): lower the "
            "learning rate"
        )

    def _moved(self) -> str | None:
        still = [chain for chain, distance in enumerate(self.distance) if distance < MIN_DISTANCE]
        if not still:
            return None
        farthest = max(self.distance[chain] for chain in still)
        return (
            f"{_chains(still, self.num_chains)} did not move ({farthest:.2g} prior std): "
            "raise the learning rate or temperature"
        )

    def _rounded(self) -> str | None:
        lost = max(self.unmoved or [0.0])
        if lost <= MAX_UNMOVED:
            return None
        return f"rounding took the first update of {lost:.0%} of the weights: raise the learning rate"

    def _corrected(self) -> str | None:
        share = max(self.beyond_series or [0.0])
        if share <= MAX_BEYOND:
            return None
        return (
            f"in {share:.0%} of the moves the minibatch noise was too large to be corrected, so that the draws are too "
            "wide: larger or more batches, or a smaller step size"
        )

    def _free(self) -> str | None:
        share = max(self.capped or [0.0])
        if share <= MAX_CAPPED:
            return None
        return (
            f"{share:.0%} of the coordinates are at the cap of the proposal's standard deviation, which is then the "
            "width of the draws: choose the cap by held-out likelihood, or raise it"
        )

    def _quiet(self) -> str | None:
        ratio = min(self.noise_ratio or [math.inf])
        if ratio >= MIN_NOISE_RATIO:
            return None
        return (
            f"the noise of minibatches is {1 / max(ratio, 1e-12):.2g} times the sampler's own: larger batch or lower "
            "learning rate"
        )

    def _accepted(self) -> str | None:
        if self.acceptance is None:
            return None
        never = [chain for chain, rate in enumerate(self.acceptance) if rate == 0]
        if never:
            return f"{_chains(never, self.num_chains)} accepted no proposal: a smaller step size, or longer burn-in"
        mean, (low, high) = statistics.fmean(self.acceptance), ACCEPTANCE_RANGE
        if mean < low:
            return f"acceptance {mean:.2g}: longer burn-in, or a smaller step size"
        return f"acceptance {mean:.3f}: longer burn-in, or a larger step size" if mean > high else None

    def _divergent(self) -> str | None:
        total = sum(self.divergences or ())
        if total == 0:
            return None
        share = "" if not self.num_moves else f" ({total / (self.num_moves * self.num_chains):.1%} of moves)"
        return f"{total} divergent moves{share}: smaller step size or higher target_acceptance"

    def _tempered(self) -> str | None:
        law = self.kinetic_temperature_law
        if self.kinetic_temperature is None or not law:  # at T = 0 momenta have no law
            return None
        low, high = widened_interval(self.dim, law, KINETIC_TOLERANCE)
        outside = [value for value in self.kinetic_temperature if not low <= value <= high]
        if not outside:
            return None
        worst = max(outside, key=lambda value: abs(value - law))
        if worst > law:
            cause = "gradient noise heats: larger batch or lower learning rate"
        elif self.ramped:
            cause = "the momenta lag behind the temperature's ramp: shorter ramp_up or longer cycles"
        else:
            cause = "the momenta have not warmed up or are rounded away: longer burn-in"
        return (
            f"kinetic temperature {worst:.3g} where {law:.3g} is expected "
            f"({len(outside)} of {self.num_chains} chains): {cause}"
        )

    def _tempered_everywhere(self) -> str | None:
        """Tensors outside of their interval are Binomial(tensors, 1 %) by chance, or fewer."""
        from scipy.stats import binom

        if self.kinetic_share is None or self._tempered() is not None:
            return None
        outside = round(sum(1 - share for share in self.kinetic_share) * self.num_tensors)
        trials = self.num_chains * self.num_tensors
        if binom.sf(outside - 1, trials, 0.01) >= OUTSIDE_BY_CHANCE:
            return None
        return (
            f"the kinetic temperature of {outside} of {trials} tensors is not that of their law, {trials / 100:.2g} by "
            "chance: larger batch or lower learning rate if they are hot, longer burn-in if they are cold"
        )

    def _settled(self) -> str | None:
        """The mean over chains of theta . grad U / d, T in expectation, and T chi^2(d) / d of one Gaussian state."""
        values, expected = self.configurational_temperature, self.temperature
        if not values or not expected or not all(map(math.isfinite, values)):
            return None
        mean = statistics.fmean(values)
        low, high = kinetic_temperature_interval(self.dim, expected)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        within = min(low, expected / CONFIGURATIONAL_FACTOR) <= mean <= max(high, expected * CONFIGURATIONAL_FACTOR)
        if within or abs(mean - expected) <= 4 * error:
            return None
        if mean > expected:
            cause = "the positions are far from their law, or gradient noise heats them: longer burn-in, larger batch"
        elif self.ramped:
            cause = "the positions lag behind the temperature's ramp: shorter ramp_up, longer cycles"
        else:
            cause = "the positions are on their way from their start: longer burn-in, larger learning rate"
        return f"configurational temperature {mean:.3g} where {expected:.3g} is expected: {cause}"

    def _mixed(self) -> str | None:
        if self.rhat is None:
            return "convergence not measured: no R-hat"
        if math.isnan(self.rhat):
            return "convergence not known: R-hat needs at least 2 chains of 4 draws that vary, or 1 of 8"
        of_each = {"": self.rhat, " of single terms": self.rhat_terms, " of logits": self.rhat_logits}
        where, worst = max(((name, value or 0.0) for name, value in of_each.items()), key=lambda item: item[1])
        if worst <= MAX_RHAT:
            return self._alone(worst)
        if math.isinf(worst):  # what moves them is told by those who saw them stand
            return f"R-hat inf over {_count(self.num_chains)}: each stands still in a place of its own"
        # quantiles, so that one bound serves for any number of quantities: of a twentieth of them to be above it by
        # chance is rarer than of one
        groups = (self.num_chains, 1) if self.num_chains > 1 else (2, 2)  # a single chain's halves are compared
        if self.num_values is not None and worst <= rhat_by_chance(groups[0], self.num_values // groups[1]):
            return (
                f"convergence not known: R-hat {worst:.2f}{where} is within chance for {self.num_values} values of "
                f"each of {_count(self.num_chains)}: more draws, or a smaller probe_steps"
            )
        cure = ": longer burn-in" if self._moved() is None else ""  # which would move nobody
        over = f"over {self.num_chains} chains" if self.num_chains > 1 else "between the halves of the chain"
        return f"R-hat {worst:.2f}{where} {over}{cure}"

    def _alone(self, rhat: float) -> str | None:
        if self.num_chains > 1:
            return None
        return (
            f"convergence not known: the chain's halves agree (R-hat {rhat:.2f}), but one chain cannot tell of places "
            "where it has not been: at least 2 chains"
        )

    def _enough(self) -> str | None:
        needed = MIN_ESS_PER_CHAIN * self.num_chains
        known = [value for value in (self.ess, self.ess_terms, self.ess_logits) if value is not None]
        found = min(known, default=math.nan)
        if math.isnan(found) or found >= needed:
            return None
        count = self.num_chains * (self.num_values or 0)
        if count < needed and found >= count / 2 > 0:
            return f"convergence not known: {count} values cannot have an ESS of {needed:.0f}: more draws"
        return f"ESS {found:.0f}, {needed:.0f} needed for {_count(self.num_chains)}: more draws, or further apart"


def _count(chains: int) -> str:
    return "1 chain" if chains == 1 else f"{chains} chains"


def _chains(chains: list[int], num_chains: int | None = None) -> str:
    if len(chains) == num_chains:
        return "the chain" if num_chains == 1 else "the chains"
    return f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains))}"


def _json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
