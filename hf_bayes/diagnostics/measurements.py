"""The diagnostic numbers of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The diagnostic numbers of a run: one number per chain, or one for all chains. A missing measurement is None.

    The probe is a fixed set of likelihood terms of the training data, on which chains are compared while they run.

    Attributes:
        dim: d, the number of coordinates of a chain.
        distance: distance of each chain from its start, in prior standard deviations. After a warm start, the start is
            the end of the warm start.
        prior_loss_ratio: the loss of prior log-density of each chain over the largest plausible loss
            (``plausibility.prior_loss_ratio``).
        kinetic_temperature: kinetic temperature of each chain, over all coordinates.
        kinetic_temperature_law: the expected kinetic temperature under the discretisation.
        kinetic_temperature_informed: the same where the data outweigh the prior: minibatches heat there. Only
            samplers that find their own step size know these directions.
        heating: the share of the temperature that minibatches were allowed to add along these directions.
        kinetic_share: ``share_within_interval`` of each chain, for means after burn-in and with ``KINETIC_TOLERANCE``.
            It is at least 99 % in a correct run.
        kinetic_inside: the share of tensors inside their 99 % interval at single updates, without tolerance, averaged
            over all updates after burn-in. It is E[T_K in R_99] of cold_posteriors app. I.1.
        num_tensors: the number of tensors behind ``kinetic_share`` and ``kinetic_inside``; at least 1.
        configurational_temperature: theta . grad U / d of each chain, mean after burn-in (cold_posteriors eq. 43).
        temperature: T, the expected configurational temperature.
        mirrored: True if chain 2k + 1 had minus the noise of chain 2k. Variances of the two depend on each other.
        informed_spread: the configurational temperature of all chains together where the data outweigh the prior
            (``diagnostics.informed_spread``). Epistemic uncertainty is too large by about its ratio to T.
        informed_spread_std_error: its standard error.
        epistemic_drift: the epistemic uncertainty of training rows after the draws of a Gaussian have moved by the
            exact energy, over the one before. It is 1 for draws of the posterior.
        kind: "chains" of a sampler; "gaussian", an approximation without chains to compare; or "optimum", the
            members of an optimiser, which are no draws.
        distance_in_noise: the distance of each chain, divided by the distance that Langevin noise alone would give at
            the same learning rates.
        unmoved: share of each chain's numbers that rounding left unchanged in the first noisy update.
        acceptance: mean acceptance probability of each chain after burn-in.
        penalty: mean noise penalty of each chain's minibatch Metropolis moves, in units of the log acceptance.
        beyond_series: share of each chain's minibatch Metropolis moves whose noise was too large to be corrected.
        capped: share of each chain's coordinates whose adaptive proposal standard deviation is at its cap.
        divergences: number of divergent trajectories (or non-finite proposals) of each chain after burn-in.
        num_moves: number of accept-reject moves of a chain after burn-in.
        rhat: R-hat of the probe's log-likelihood, between chains; for a single chain, between its halves. NaN if it
            could not be computed.
        ess: ESS of the probe's log-likelihood, over all chains together. Mirrored pairs count once in every ESS.
        rhat_terms: R-hat of the log-probabilities of the probe's labels, one by one: the 95 % quantile over labels.
        ess_terms: ESS of the same log-probabilities: the 5 % quantile over labels.
        rhat_logits: R-hat of logits of the probe's terms, including logits of other classes than the label: the 95 %
            quantile over logits. The logits are freed of the part that the likelihood ignores
            (``Likelihood.identified``). For a regression they are predicted means.
        ess_logits: ESS of the same logits: the 5 % quantile over logits.
        num_values: number of values per chain behind the R-hats and ESS.
        values: the kind of these values: "draws", or "probe evaluations", after burn-in.
        num_terms: number of likelihood terms of the probe.
        num_logits: number of logits behind ``rhat_logits`` and ``ess_logits``.
        noise_ratio: variance of the sampler's injected noise over the variance of the minibatch gradients, of each
            chain: the harmonic mean over the updates after burn-in at which it was measured.
        ramped: True if the temperature rose from 0 in each cycle.
        chosen_temperature: the T below 1 that held-out rows chose from a ladder; None without such a choice.
        stopped_at: the number of updates after which the run was stopped (``EarlyStoppingCallback``); None for a run
            that made all of its updates.
        num_planned_updates: the number of updates that a run that was stopped would have made; else None.
        num_draws_before_stop: the number of draws of each chain until then; else None. If it is 0, the last states of
            the chains are in the place of draws.
    """

    dim: int
    distance: Sequence[float]
    prior_loss_ratio: Sequence[float] | None = None
    kinetic_temperature: Sequence[float] | None = None
    kinetic_temperature_law: float | None = None
    kinetic_temperature_informed: Sequence[float] | None = None
    heating: float = 0.0
    kinetic_share: Sequence[float] | None = None
    kinetic_inside: Sequence[float] | None = None
    num_tensors: int = 1
    configurational_temperature: Sequence[float] | None = None
    temperature: float | None = None
    mirrored: bool = False
    informed_spread: float | None = None
    informed_spread_std_error: float | None = None
    epistemic_drift: float | None = None
    kind: str = "chains"
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
    chosen_temperature: float | None = None
    stopped_at: int | None = None
    num_planned_updates: int | None = None
    num_draws_before_stop: int | None = None

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if isinstance(values, (list, tuple)) and len(values) != self.num_chains:
                raise ValueError(
                    f"Diagnostics.{name} needs one number per chain: got {len(values)}, distance has {self.num_chains}"
                )

    @property
    def num_chains(self) -> int:
        """The number of chains."""
        return len(self.distance)

    @property
    def has_no_draws(self) -> bool:
        """True if a sampler was stopped before its first draw. An optimiser or the fit of a Gaussian may end early."""
        return self.kind == "chains" and self.num_draws_before_stop == 0

    @property
    def num_independent(self) -> int:
        """The number of independent chains: a mirrored pair counts once."""
        return num_independent(self.num_chains, mirrored=self.mirrored)


def num_independent(num_chains: int, *, mirrored: bool) -> int:
    """Return the number of independent chains: the pairs of mirrored chains, of which the last may be a single one."""
    return (num_chains + 1) // 2 if mirrored else num_chains


def pair_means(values: Sequence[float], *, mirrored: bool) -> list[float]:
    """Return a mean for each independent chain: of a mirrored pair the mean of both."""
    size = 2 if mirrored else 1
    return [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]
