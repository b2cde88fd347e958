"""The checks of a run's temperatures: each returns a complaint with its remedy, or None."""

from __future__ import annotations

import math
import statistics

from hf_bayes.diagnostics.measurements import Measurements, pair_means
from hf_bayes.diagnostics.temperatures import KINETIC_TOLERANCE, kinetic_temperature_interval, widened_interval

OUTSIDE_BY_CHANCE = 0.005
"""The probability below which chance does not explain how many tensors are outside their intervals."""

CONFIGURATIONAL_FACTOR = 2.0
"""The configurational temperature may be wrong by this factor: it scatters in short runs, and its variance is
unknown."""

INFORMED_FACTOR = 1.25
"""The factor above the allowed heating at which a chain counts as too hot where the data outweigh the prior. Epistemic
uncertainty grows by about as much."""


def check_kinetic(run: Measurements) -> str | None:
    """Compare the temperature of the momenta of each chain with its law.

    If predictions chose T, they chose it with the heating that is allowed.
    """
    law = run.kinetic_temperature_law
    if run.kinetic_temperature is None or not law:  # at T = 0 momenta have no law
        return None
    low, high = widened_interval(run.dim, law, KINETIC_TOLERANCE)
    high = high if run.chosen_temperature is None else max(high, (1 + run.heating) * law)
    outside = [value for value in run.kinetic_temperature if not low <= value <= high]
    if not outside:
        return None
    worst = max(outside, key=lambda value: abs(value - law))
    if worst > law:
        cause = "gradient noise heats: larger batch or lower learning rate"
    elif run.ramped:
        cause = "the momenta lag behind the temperature's ramp: shorter ramp_up or longer cycles"
    else:
        cause = "the momenta have not warmed up or are rounded away: longer burn-in"
    return (
        f"kinetic temperature {worst:.3g} where {law:.3g} is expected "
        f"({len(outside)} of {run.num_chains} chains): {cause}"
    )


def check_kinetic_informed(run: Measurements) -> str | None:
    """Compare the temperature of the momenta where the data outweigh the prior with what ``heating`` allows."""
    law = run.kinetic_temperature_law
    if run.kinetic_temperature_informed is None or not law:
        return None
    allowed = (1 + run.heating) * law
    hot = [value for value in run.kinetic_temperature_informed if value > INFORMED_FACTOR * allowed]
    if not hot:
        return None
    return (
        f"kinetic temperature {max(hot):.3g} where the data outweigh the prior, but at most {allowed:.3g} is "
        f"allowed ({len(hot)} of {run.num_chains} chains): their epistemic uncertainty is too large by about as "
        "much; larger batch, or lower heating"
    )


def check_kinetic_of_tensors(run: Measurements) -> str | None:
    """Compare the number of tensors outside their 99 % interval with its law by chance, Binomial(tensors, 1 %)."""
    from scipy.stats import binom

    if run.kinetic_share is None or check_kinetic(run) is not None:
        return None
    # the momenta of two mirrored chains have the same temperature
    shares = pair_means(run.kinetic_share, mirrored=run.mirrored)
    outside = round(sum(1 - share for share in shares) * run.num_tensors)
    trials = len(shares) * run.num_tensors
    if binom.sf(outside - 1, trials, 0.01) >= OUTSIDE_BY_CHANCE:
        return None
    return (
        f"the kinetic temperature of {outside} of {trials} tensors is not the expected one, {trials / 100:.2g} by "
        "chance: larger batch or lower learning rate if they are hot, longer burn-in if they are cold"
    )


def check_configurational(run: Measurements) -> str | None:
    """Compare the mean over chains of theta . grad U / d with its expectation T.

    For a single state of a Gaussian law it is distributed as T chi^2(d) / d.
    """
    values, expected = run.configurational_temperature, run.temperature
    if not values or not expected or not all(map(math.isfinite, values)):
        return None
    mean = statistics.fmean(values)
    low, high = kinetic_temperature_interval(run.dim, expected)
    independent = pair_means(values, mirrored=run.mirrored)
    error = statistics.stdev(independent) / math.sqrt(len(independent)) if len(independent) > 1 else 0.0
    within = min(low, expected / CONFIGURATIONAL_FACTOR) <= mean <= max(high, expected * CONFIGURATIONAL_FACTOR)
    if within or abs(mean - expected) <= 4 * error:
        return None
    if mean > expected:
        cause = "the positions are far from their law, or gradient noise heats them: longer burn-in, larger batch"
    elif run.ramped:
        cause = "the positions lag behind the temperature's ramp: shorter ramp_up, longer cycles"
    else:
        cause = "the positions are on their way from their start: longer burn-in, larger learning rate"
    return f"configurational temperature {mean:.3g} where {expected:.3g} is expected: {cause}"
