"""The verdict on a run in words: "converged", or what is wrong and what to do about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS, rhat_by_chance
from hf_bayes.diagnostics.early_stop import check_stop
from hf_bayes.diagnostics.informed_spread import DRIFT_TOLERANCE, MAX_SPREAD_ERROR, SPREAD_TOLERANCE
from hf_bayes.diagnostics.measurements import Measurements
from hf_bayes.diagnostics.plausibility import is_implausible
from hf_bayes.diagnostics.temperature_checks import (
    check_configurational,
    check_kinetic,
    check_kinetic_informed,
    check_kinetic_of_tensors,
)

UNKNOWN = "convergence not"
"""The beginning of every complaint that reports missing knowledge and no fault."""

MIN_DISTANCE = 1e-4
"""Prior standard deviations (RMS over coordinates) below which a chain counts as not moved. Even if a million tokens
each carry a nat per squared prior std about every coordinate, the posterior std is 1e-3."""

ACCEPTANCE_RANGE = (0.1, 0.99)
"""The range of a useful mean acceptance. Below it nearly all proposals are refused; above it steps are too small."""

MAX_UNMOVED = 0.01
"""The largest tolerated share of a chain's numbers that a noisy update leaves unchanged. By chance it is a few in a
million."""

MAX_BEYOND = 0.01
"""The largest tolerated share of minibatch Metropolis moves with noise too large for the correction. The resulting
error of the posterior's width cannot be seen with few draws."""

MAX_CAPPED = 0.05
"""The largest tolerated share of an adaptive proposal's coordinates at its cap. Above it the width of the draws is
determined by the cap and not by the data."""

MIN_NOISE_RATIO = 1.0
"""The smallest tolerated ratio of the injected variance to the variance of the minibatch gradient. Below it a chain is
more than twice as hot as intended, unless the sampler subtracts the gradient's variance."""


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Measurements):
    """The measurements of a run with their verdict.

    Each check returns a complaint with its remedy, or None.
    """

    spread_advice: str = ""  # of the method's Requirements; it is no measurement, and ``summary`` leaves it out

    @property
    def complaints(self) -> list[str]:
        """The faults of the run and what is not known about it, with remedies, the gravest first."""
        checks: tuple[Callable[[], str | None], ...] = (
            lambda: check_stop(self),
            self._check_finite,
            self._check_plausible,
            self._check_moved,
            self._check_rounding,
            self._check_acceptance,
            self._check_corrected_noise,
            self._check_proposal_cap,
            self._check_divergences,
            lambda: check_kinetic(self),
            lambda: check_kinetic_informed(self),
            lambda: check_kinetic_of_tensors(self),
            lambda: check_configurational(self),
            self._check_informed_spread,
            self._check_drift,
            self._check_gradient_noise,
            self._check_rhat,
            self._check_ess,
        )
        return [complaint for check in checks if (complaint := check())]

    @property
    def verdict(self) -> str:
        """The word "converged", or the complaints, and what is right in spite of them."""
        complaints = "; ".join(self.complaints)
        if complaints and self._is_chosen:
            return (
                f"{UNKNOWN} asked for: held-out rows chose T = {self.chosen_temperature:g} because it predicts best, "
                f"and not for draws of a posterior. Checks of such draws that failed: {complaints}"
            )
        if not complaints or self.epistemic_size != "right":
            return complaints or "converged"
        return (
            f"{complaints}. The size of epistemic uncertainty is right nevertheless (configurational temperature "
            f"{self._found_spread} where the data outweigh the prior); its ranking of inputs is not known to be"
        )

    @property
    def converged(self) -> bool | None:
        """True or False; None if no fault was found but too little is known, or if predictions chose T."""
        complaints = self.complaints
        if complaints and (self._is_chosen or all(text.startswith(UNKNOWN) for text in complaints)):
            return None
        return not complaints

    @property
    def _is_chosen(self) -> bool:
        """True if predictions chose T < 1, and there are draws, in places that prior and data allow.

        A ladder does not wait until chains arrive at such a T: they need not be draws of any posterior.
        """
        if self.has_no_draws or self._check_finite() or self._check_plausible():
            return False
        return self.chosen_temperature is not None

    @property
    def epistemic_size(self) -> Literal["right", "too large", "too small"] | None:
        """The size of epistemic uncertainty, from the spread of the draws; None if it was not measured.

        Draws that are too few for R-hat and ESS may have the right spread: it is one number for all of them. A Gaussian
        of the right spread may have its mean in the wrong place, which its drift shows.
        """
        size = self._size_by_spread
        return self._size_by_drift if size == "right" else size

    @property
    def _size_by_drift(self) -> Literal["right", "too large", "too small"]:
        if self.epistemic_drift is None or abs(math.log(self.epistemic_drift)) <= math.log1p(DRIFT_TOLERANCE):
            return "right"
        return "too large" if self.epistemic_drift < 1 else "too small"

    @property
    def _size_by_spread(self) -> Literal["right", "too large", "too small"] | None:
        if not self._knows_spread:
            return None
        assert self.informed_spread is not None
        assert self.informed_spread_std_error is not None
        expected = self.temperature or 1.0
        if abs(self.informed_spread - expected) <= max(SPREAD_TOLERANCE * expected, 2 * self.informed_spread_std_error):
            return "right"
        return "too large" if self.informed_spread > expected else "too small"

    def summary(self) -> dict[str, Any]:
        """Return measurements, number of chains and verdict for JSON. Numbers that are not finite become null."""
        fields = {name: _json(value) for name, value in asdict(self).items() if name != "spread_advice"}
        judged = {name: getattr(self, name) for name in ("num_chains", "verdict", "converged", "epistemic_size")}
        return {**fields, **judged}

    def _check_finite(self) -> str | None:
        broken = [chain for chain, distance in enumerate(self.distance) if not math.isfinite(distance)]
        return f"{_chains(broken)} not finite: lower the learning rate" if broken else None

    def _check_plausible(self) -> str | None:
        lost = [chain for chain, ratio in enumerate(self.prior_loss_ratio or []) if is_implausible(ratio)]
        if not lost or self._check_finite():
            return None
        return (
            f"{_chains(lost, self.num_chains)} left every place that prior and data allow (the draws lost "
            f"{max(self.prior_loss_ratio or []):.2g} times the nats of prior density that the data can explain): lower "
            "the learning rate"
        )

    def _check_moved(self) -> str | None:
        still = [chain for chain, distance in enumerate(self.distance) if distance < MIN_DISTANCE]
        if not still:
            return None
        farthest = max(self.distance[chain] for chain in still)
        return (
            f"{_chains(still, self.num_chains)} did not move ({farthest:.2g} prior std): "
            "raise the learning rate or temperature"
        )

    def _check_rounding(self) -> str | None:
        share = max(self.unmoved or [0.0])
        if share <= MAX_UNMOVED:
            return None
        return f"rounding took the first update of {share:.0%} of the weights: raise the learning rate"

    def _check_corrected_noise(self) -> str | None:
        share = max(self.beyond_series or [0.0])
        if share <= MAX_BEYOND:
            return None
        return (
            f"in {share:.0%} of the moves the minibatch noise was too large to be corrected, so that the draws are too "
            "wide: larger or more batches, or a smaller step size"
        )

    def _check_proposal_cap(self) -> str | None:
        share = max(self.capped or [0.0])
        if share <= MAX_CAPPED:
            return None
        return (
            f"{share:.0%} of the coordinates are at the cap of the proposal's standard deviation, which is then the "
            "width of the draws: choose the cap by held-out likelihood, or raise it"
        )

    def _check_gradient_noise(self) -> str | None:
        ratio = min(self.noise_ratio or [math.inf])
        if ratio >= MIN_NOISE_RATIO:
            return None
        return (
            f"the noise of minibatches is {1 / max(ratio, 1e-12):.2g} times the sampler's own: larger batch or lower "
            "learning rate"
        )

    def _check_acceptance(self) -> str | None:
        if self.acceptance is None:
            return None
        never = [chain for chain, rate in enumerate(self.acceptance) if rate == 0]
        if never:
            return f"{_chains(never, self.num_chains)} accepted no proposal: a smaller step size, or longer burn-in"
        mean, (low, high) = statistics.fmean(self.acceptance), ACCEPTANCE_RANGE
        if mean < low:
            return f"acceptance {mean:.2g}: longer burn-in, or a smaller step size"
        return f"acceptance {mean:.3f}: longer burn-in, or a larger step size" if mean > high else None

    def _check_divergences(self) -> str | None:
        total = sum(self.divergences or ())
        if total == 0:
            return None
        share = "" if not self.num_moves else f" ({total / (self.num_moves * self.num_chains):.1%} of moves)"
        return f"{total} divergent moves{share}: smaller step size or higher target_acceptance"

    def _check_informed_spread(self) -> str | None:
        """Compare the configurational temperature where the data outweigh the prior with T."""
        size = self._size_by_spread
        if size is None or size == "right":
            return None
        wide = size == "too large"
        of_chains = "larger batch, smaller step size, or longer burn-in" if wide else "longer burn-in"
        of_gaussian = f"a sampler, or {self.spread_advice or 'the curvature at a mode (docs/laplace.md)'}"
        remedy = of_chains if self.kind == "chains" else of_gaussian
        return (
            f"the draws are too {'wide' if wide else 'narrow'} where the data outweigh the prior "
            f"(configurational temperature {self._found_spread} where {self.temperature or 1.0:.3g} is expected): "
            f"epistemic uncertainty is {size} by about as much; {remedy}"
        )

    def _check_drift(self) -> str | None:
        """Compare the epistemic uncertainty of a Gaussian before and after its draws have moved by the exact energy."""
        if self._size_by_spread != "right" or self._size_by_drift == "right":
            return None
        return (
            f"epistemic uncertainty is {self._size_by_drift}: it changes by a factor of {self.epistemic_drift:.2g} on "
            "training rows when the draws move by the exact energy, so the mean or a width of the Gaussian is wrong; a "
            "sampler"
        )

    @property
    def _found_spread(self) -> str:
        return f"{self.informed_spread:.3g} +- {self.informed_spread_std_error:.1g}"

    @property
    def _knows_spread(self) -> bool:
        """True if the spread was measured precisely enough to find an error of the size of the tolerance."""
        if self.kind == "optimum" or self.has_no_draws:
            return False
        if self.informed_spread is None or self.informed_spread_std_error is None:
            return False
        scale = max(abs(self.informed_spread), self.temperature or 1.0)
        return math.isfinite(self.informed_spread) and self.informed_spread_std_error <= MAX_SPREAD_ERROR * scale

    def _check_rhat(self) -> str | None:
        if self.kind == "optimum":
            return (
                "convergence not defined: members of an optimiser are no draws from the posterior, and their "
                "disagreement is not its epistemic uncertainty"
            )
        if self.kind == "gaussian":
            unknown = "convergence not measured: the Gaussian was not compared with the posterior"
            return None if self._knows_spread else unknown
        if self.rhat is None:
            return None if self.has_no_draws else "convergence not measured: no R-hat"
        if math.isnan(self.rhat):
            return "convergence not known: R-hat needs at least 2 chains of 4 draws that vary, or 1 of 8"
        rhats = {"": self.rhat, " of single terms": self.rhat_terms, " of logits": self.rhat_logits}
        where, worst = max(((name, value or 0.0) for name, value in rhats.items()), key=lambda item: item[1])
        if worst <= self._max_rhat:
            return self._check_single_chain(worst)
        if math.isinf(worst):  # no remedy here: ``_check_moved`` and ``_check_acceptance`` give one
            return f"R-hat inf over {_count(self.num_chains)}: every chain is constant, at a different place"
        # R-hats of terms and logits are quantiles, so one bound serves for any number of quantities: it is less likely
        # that a twentieth of them exceed the bound by chance than that a single one does
        # the halves of a single chain are compared
        groups = (self.num_independent, 1) if self.num_chains > 1 else (2, 2)
        if self.num_values is not None and worst <= rhat_by_chance(groups[0], self.num_values // groups[1]):
            return (
                f"convergence not known: R-hat {worst:.2f}{where} is within chance for {self.num_values} values of "
                f"each of {_count(self.num_chains)}: more draws, or a smaller probe_steps"
            )
        # longer burn-in does not help chains that do not move
        remedy = ": longer burn-in" if self._check_moved() is None else ""
        over = f"over {self.num_chains} chains" if self.num_chains > 1 else "between the halves of the chain"
        return f"R-hat {worst:.2f}{where} {over}{remedy}"

    @property
    def _max_rhat(self) -> float:
        """The largest R-hat of chains that agree.

        Converged chains have R-hat^2 = 1 + 2 K / ESS, so a fixed bound asks for an ESS of each chain. If the spread of
        the draws is right, many short chains do: the bound is then that of as many draws in 4 chains. Variances of
        mirrored chains have half of that ESS, so pairs count.
        """
        chains = max(4, self.num_independent) if self._knows_spread else 4
        return math.sqrt(1 + (MAX_RHAT**2 - 1) * chains / 4)

    def _check_single_chain(self, rhat: float) -> str | None:
        if self.num_chains > 1:
            return None
        return (
            f"convergence not known: the chain's halves agree (R-hat {rhat:.2f}), but one chain cannot show whether "
            "it has missed other regions: at least 2 chains"
        )

    def _check_ess(self) -> str | None:
        known = [
            value
            for value in (self.ess, self.ess_terms, self.ess_logits)
            if value is not None and not math.isnan(value)
        ]
        found = min(known, default=math.nan)
        count = self.num_independent * (self.num_values or 0)
        if 0 < count < MIN_ESS and not found < count / 2:
            return f"convergence not known: {count} values cannot have an ESS of {MIN_ESS:.0f}: more draws"
        if math.isnan(found) or found >= MIN_ESS:
            return None
        return f"ESS {found:.0f}, {MIN_ESS:.0f} needed: more draws, or further apart"


def _count(chains: int) -> str:
    return "1 chain" if chains == 1 else f"{chains} chains"


def _chains(chains: list[int], num_chains: int | None = None) -> str:
    if len(chains) == num_chains:
        return "the chain" if num_chains == 1 else "the chains"
    return f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains))}"


def _json(value: Any) -> Any:
    match value:
        case list() | tuple():
            return [_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value
