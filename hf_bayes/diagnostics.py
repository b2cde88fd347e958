"""Did it work? R-hat, ESS, kinetic temperature, distance moved, rounding: numbers per chain and a verdict in words.

R-hat and ESS are meant for functions of theta (the log-likelihood of probe texts, say): coordinates of a LoRA have
symmetries along which equally good chains never agree.
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

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

MAX_RHAT = 1.05
"""Vehtari et al. (2021) ask for 1.01 in final results, which 29 % of quantities exceed at 4 chains of 50 independent
draws; 0.2 % exceed 1.05."""

MAX_UNMOVED = 0.01
"""Share of a chain's numbers that an update with noise may leave as they are; by chance it is a few in a million."""

MAX_BEYOND = 0.01
"""Share of minibatch Metropolis moves whose noise may be too large for its correction: what the posterior's width then
misses is below what few draws tell."""

MIN_NOISE_RATIO = 1.0
"""Injected variance over that of the minibatch gradient. Below it a chain is more than twice as hot as it says, unless
the sampler subtracts the gradient's."""

MIN_ESS_PER_CHAIN = 50.0
"""Vehtari et al. (2021): below it R-hat and ESS themselves cannot be trusted."""


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalised split R-hat (Vehtari et al. 2021, eq. 14), by arviz.

    Args:
        draws: [M, S, k] draws of k quantities.
    Returns:
        [k] float64; 1 is convergence. NaN where it is not defined: fewer than 2 chains or 4 draws, a NaN or infinite
        draw, a quantity that never changes. inf where chains that do not move differ.
    """

    def of_one(column: np.ndarray) -> float:
        import arviz

        if (column == column[:, :1]).all():
            return math.nan if (column == column[0, 0]).all() else math.inf
        return float(arviz.rhat(column))

    return _each(draws, of_one, name="rhat", min_chains=2)


def rhat_by_chance(num_chains: int, num_values: int, *, probability: float = 0.995) -> float:
    """What R-hat exceeds with probability 1 - p although the chains are one law: of independent normal values.

    W and B of split chains, 2 K of n = S / 2 values, have B / W ~ F(2 K - 1, 2 K (n - 1)) (Gelman and Rubin 1992), so
    R-hat = sqrt((n - 1 + F) / n). Correlated values exceed it more often, and rightly so.

    Args:
        num_chains: K.
        num_values: S, of each chain.
        probability: p.
    """
    from scipy.stats import f

    n, groups = num_values // 2, 2 * num_chains
    return math.sqrt((n - 1 + float(f.ppf(probability, groups - 1, groups * (n - 1)))) / n)


def ess(draws: Tensor) -> Tensor:
    """Bulk effective sample size of all chains together (Vehtari et al. 2021), by arviz.

    Args:
        draws: [M, S, k] draws of k quantities.
    Returns:
        [k] float64. NaN where it is not defined: fewer than 4 draws, a NaN or infinite draw, a quantity that
        never changes.
    """

    def of_one(column: np.ndarray) -> float:
        import arviz

        # arviz calls a quantity that never changes M * S independent draws
        return math.nan if (column == column[0, 0]).all() else float(arviz.ess(column))

    return _each(draws, of_one, name="ess", min_chains=1)


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


def unconverged(
    values: Tensor, *, max_rhat: float = MAX_RHAT, min_ess_per_chain: float = MIN_ESS_PER_CHAIN
) -> str | None:
    """What speaks against draws being of one law and enough of them, in words; None if nothing does.

    Args:
        values: [M, S, k] of k functions of theta; one that never changes says nothing.
        max_rhat: largest R-hat that any of them may have.
        min_ess_per_chain: smallest ESS, over the number of chains.
    """
    if not bool(values.isfinite().all()):
        return "not all draws are finite"
    ratios, sizes = rhat(values), ess(values)
    if bool(ratios.isnan().all()):
        return "R-hat needs at least 2 chains of 4 draws that vary, so that nobody knows"
    worst, fewest = float(ratios.nan_to_num(0.0, posinf=math.inf).max()), float(sizes.nan_to_num(math.inf).min())
    needed = min_ess_per_chain * values.shape[0]
    doubts = [f"R-hat {worst:.3g} where {max_rhat:g} is allowed"] * (worst > max_rhat)
    doubts += [f"ESS {fewest:.0f} where {needed:.0f} is needed"] * (fewest < needed)
    return ", ".join(doubts) or None


def require_converged(
    values: Tensor, what: str, *, max_rhat: float = MAX_RHAT, min_ess_per_chain: float = MIN_ESS_PER_CHAIN
) -> None:
    """Refuse to judge others by draws that are not converged themselves.

    Args:
        values: see ``unconverged``.
        what: names them in the error.
    Raises:
        ValueError: saying what speaks against them.
    """
    doubts = unconverged(values, max_rhat=max_rhat, min_ess_per_chain=min_ess_per_chain)
    if doubts is not None:
        raise ValueError(f"{what} cannot judge others: {doubts}. Give it a longer burn-in and more draws")


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


@dataclass(frozen=True)
class RiskAsymptote:
    """C(S) = C(inf) + a_1 / S + a_2 / S^2 of the mean negative log-likelihood of S members (cold_posteriors eq. 34).

    Attributes:
        sizes: S = 1, ..., M.
        risks: C(S), nats per term, a mean over subsets of the members.
        limit: C(inf).
        slope, curvature: a_1, a_2.
        std_error: of the limit, from leaving out one chain at a time (one member, where chains have one draw each).
    """

    sizes: list[int]
    risks: list[float]
    limit: float
    slope: float
    curvature: float
    std_error: float

    @property
    def fitted_from(self) -> int:
        """The smallest S that the fit sees."""
        return _fitted_from(len(self.sizes))


MIN_MEMBERS = 8
"""Fewer do not tell three coefficients and an error."""


def risk_asymptote(log_lik: Tensor, chain: Sequence[int]) -> RiskAsymptote | None:
    """What infinitely many members would do (cold_posteriors app. F): a least squares fit to C(S) for S >= M / 4.

    The paper fits S >= 20. C(S) is the mean over 16 random orders of the members of what the first S do together, the
    same orders whichever member is left out.

    Args:
        log_lik: [n, M] log p of n labels, of each member.
        chain: [M] which chain a member is of.
    Returns:
        None for fewer than ``MIN_MEMBERS`` members, or a label that all members call impossible.
    """
    count = log_lik.shape[1]
    if count < MIN_MEMBERS:
        return None
    log_lik = log_lik.double()
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(16)])
    risks = _risks(log_lik, orders)
    if not bool(risks.isfinite().all()):
        return None
    limit, slope, curvature = _fit(risks).tolist()
    groups = torch.tensor(chain)
    if len(groups.unique()) == 1 or len(groups.unique()) < MIN_MEMBERS // 2:
        groups = torch.arange(count)  # too few chains to leave one out
    named = groups.unique()
    left_out = torch.stack([_fit(_risks(log_lik, _without(orders, groups == group)))[0] for group in named])
    variance = (len(named) - 1) / len(named) * (left_out - left_out.mean()).square().sum()
    sizes = list(range(1, count + 1))
    return RiskAsymptote(sizes, risks.tolist(), limit, slope, curvature, math.sqrt(float(variance)))


def _risks(log_lik: Tensor, orders: Tensor) -> Tensor:
    """[S]: C(1), ..., C(S) of the first members of each of the orders [R, S]."""
    sizes = torch.arange(1, orders.shape[1] + 1, dtype=log_lik.dtype)
    peak = log_lik.amax(1, keepdim=True)
    weights = (log_lik - peak).exp()  # five times as fast as logcumsumexp, and as good up to 700 nats below the peak
    risks = [sizes.log() - (weights[:, order].cumsum(1).log() + peak).mean(0) for order in orders]
    return torch.stack(risks).mean(0)


def _without(orders: Tensor, left_out: Tensor) -> Tensor:
    """The orders [R, M] without some members [M]."""
    return orders[~left_out[orders]].view(len(orders), -1)


def _fit(risks: Tensor) -> Tensor:
    """[3]: C(inf), a_1, a_2."""
    sizes = torch.arange(_fitted_from(len(risks)), len(risks) + 1, dtype=risks.dtype)
    powers = torch.stack([sizes**0, 1 / sizes, 1 / sizes**2], 1)
    return torch.linalg.lstsq(powers, risks[_fitted_from(len(risks)) - 1 :, None], driver="gelsd").solution[:, 0]


def _fitted_from(count: int) -> int:
    return -(-count // 4)


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What a run tells about itself: one number per chain, or one for all of them. What was not measured stays None.

    Attributes:
        dim: d, coordinates of a chain.
        distance: how far each chain moved from its start (the end of a warm start), in prior standard deviations.
        kinetic_temperature: of each chain, over all coordinates.
        kinetic_temperature_law: what the discretisation makes it in expectation.
        kinetic_share: ``share_within_interval`` of each chain, tensor by tensor, of means after burn-in and with
            ``KINETIC_TOLERANCE``; at least 99 % where all is well.
        num_tensors: tensors that it is a share of; at least 1.
        configurational_temperature: theta . grad U / d of each chain, mean after burn-in (cold_posteriors eq. 43).
        temperature: T, what it is in expectation.
        distance_in_noise: the distance over that which Langevin noise alone would have gone at these learning rates.
        unmoved: share of each chain's numbers that the first noisy update left as they were, by rounding.
        acceptance: mean acceptance probability of each chain after burn-in.
        beyond_series: share of each chain's minibatch Metropolis moves whose noise was too large to be corrected.
        divergences: divergent trajectories (or non-finite proposals) of each chain after burn-in.
        num_moves: accept-reject moves of a chain after burn-in.
        rhat: of the probe's log-likelihood; NaN if it could not be computed.
        ess: of the same, of all chains together.
        rhat_terms: of the log-probabilities of the probe's labels, one by one: the 95 % quantile over them.
        ess_terms: of the same: the 5 % quantile.
        num_values: values of each chain that these four are of.
        values: what they are: "draws", or "looks while training", after burn-in.
        noise_ratio: variance of the sampler's own noise over that of the minibatch gradients, of each chain.
        ramped: whether the temperature rose from 0 in each cycle.
    """

    dim: int
    distance: Sequence[float]
    kinetic_temperature: Sequence[float] | None = None
    kinetic_temperature_law: float | None = None
    kinetic_share: Sequence[float] | None = None
    num_tensors: int = 1
    configurational_temperature: Sequence[float] | None = None
    temperature: float | None = None
    distance_in_noise: Sequence[float] | None = None
    unmoved: Sequence[float] | None = None
    acceptance: Sequence[float] | None = None
    beyond_series: Sequence[float] | None = None
    divergences: Sequence[int] | None = None
    num_moves: int | None = None
    rhat: float | None = None
    ess: float | None = None
    rhat_terms: float | None = None
    ess_terms: float | None = None
    num_values: int | None = None
    values: str | None = None
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
            self._moved,
            self._rounded,
            self._accepted,
            self._corrected,
            self._divergent,
            self._tempered,
            self._tempered_everywhere,
            self._settled,
            self._quiet,
            self._mixed,
            self._enough,
        )
        return "; ".join(complaint for check in checks if (complaint := check())) or "converged"

    def summary(self) -> dict[str, Any]:
        """JSON-ready: the fields, the number of chains and the verdict; numbers that are not finite are null."""
        return {**{name: _json(value) for name, value in asdict(self).items()}, "num_chains": self.num_chains} | {
            "verdict": self.verdict
        }

    def _finite(self) -> str | None:
        lost = [chain for chain, distance in enumerate(self.distance) if not math.isfinite(distance)]
        return f"{_chains(lost)} not finite: lower the learning rate" if lost else None

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
            return "convergence not known: R-hat needs at least 2 chains of 4 draws that vary"
        worst = max(self.rhat, self.rhat_terms or 0.0)
        if worst <= MAX_RHAT:
            return None
        if math.isinf(worst):  # what moves them is told by those who saw them stand
            return f"R-hat inf over {self.num_chains} chains: each stands still in a place of its own"
        where = "" if worst == self.rhat else " of single terms"
        if self.num_values is not None and worst <= rhat_by_chance(self.num_chains, self.num_values):
            return (
                f"convergence not known: R-hat {worst:.2f}{where} is within chance for {self.num_values} values of "
                f"each of {self.num_chains} chains: more draws, or a smaller probe_steps"
            )
        cure = ": longer burn-in" if self._moved() is None else ""  # which would move nobody
        return f"R-hat {worst:.2f}{where} over {self.num_chains} chains{cure}"

    def _enough(self) -> str | None:
        needed = MIN_ESS_PER_CHAIN * self.num_chains
        found = min((value for value in (self.ess, self.ess_terms) if value is not None), default=math.nan)
        if math.isnan(found) or found >= needed:
            return None
        count = self.num_chains * (self.num_values or 0)
        if count < needed and found >= count / 2 > 0:
            return f"convergence not known: {count} values cannot have an ESS of {needed:.0f}: more draws"
        return f"ESS {found:.0f}, {needed:.0f} needed for {self.num_chains} chains: more draws, or further apart"


def _chains(chains: list[int], num_chains: int | None = None) -> str:
    if len(chains) == num_chains:
        return "the chain" if num_chains == 1 else "the chains"
    return f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains))}"


def _json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _each(draws: Tensor, of_one: Callable[[np.ndarray], float], *, name: str, min_chains: int) -> Tensor:
    """[k]: the statistic of each quantity [M, S]; NaN where there are too few draws or not all are finite."""
    if draws.ndim != 3:
        raise ValueError(f"{name} needs draws of shape [M, S, k], got {list(draws.shape)}")
    enough = draws.shape[0] >= min_chains and draws.shape[1] >= 4
    columns = draws.detach().double().cpu().permute(2, 0, 1).numpy()
    with _quiet():
        values = [of_one(column) if enough and np.isfinite(column).all() else math.nan for column in columns]
    return torch.tensor(values, dtype=torch.float64)


@contextmanager
def _quiet() -> Iterator[None]:
    """arviz warns of its own future, of many chains and of constant draws, which all have an answer here."""
    logger = logging.getLogger("arviz")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
