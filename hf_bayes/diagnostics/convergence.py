"""Convergence of chains: R-hat and effective sample size (ESS), computed by arviz.

Both are meant for functions of theta, such as the log-likelihood of probe texts. Coordinates of a LoRA have symmetries,
along which equally good chains never agree.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_bayes.diagnostics.measurements import num_independent

Column = NDArray[np.float64]
Statistic = Callable[[Column], float]

MAX_RHAT = 1.05
"""The largest R-hat of converged chains. Vehtari et al. (2021) recommend 1.01 for final results. For 4 chains of 50
independent draws, 29 % of quantities exceed 1.01 by chance, and 0.2 % exceed 1.05."""

MIN_ESS = 100.0
"""The smallest sufficient ESS of all chains together. The mean of a prediction over the draws then has a standard error
of a tenth of its standard deviation. Vehtari et al. (2021) recommend 400 for quantiles of single parameters."""


def rhat(draws: Tensor) -> Tensor:
    """Return the rank-normalised split R-hat of each quantity (Vehtari et al. 2021, eq. 14).

    Args:
        draws: [M, S, k] draws of k quantities.
    Returns:
        [k] float64; 1 means convergence. NaN where R-hat is not defined: fewer than 2 chains or 4 draws, a NaN or
        infinite draw, or a quantity that never changes. inf where every chain is constant and the chains differ.
    """

    def of_one(column: Column) -> float:
        import arviz

        compute: Statistic = arviz.rhat
        if (column == column[:, :1]).all():
            return math.nan if (column == column[0, 0]).all() else math.inf
        return float(compute(column))

    return _each(draws, of_one, name="rhat", min_chains=2)


def rhat_by_chance(num_chains: int, num_values: int, *, probability: float = 0.995) -> float:
    """Return the p-quantile of R-hat for converged chains of independent normal values.

    Splitting K chains gives 2 K sequences of n = S / 2 values. Their variances between and within sequences, B and W,
    have B / W ~ F(2 K - 1, 2 K (n - 1)) (Gelman and Rubin 1992), so R-hat = sqrt((n - 1 + F) / n). Correlated values
    exceed this quantile more often, as they should.

    Args:
        num_chains: K.
        num_values: S, the number of values of each chain.
        probability: p.
    """
    from scipy.stats import f

    n, groups = num_values // 2, 2 * num_chains
    return math.sqrt((n - 1 + float(f.ppf(probability, groups - 1, groups * (n - 1)))) / n)


def ess(draws: Tensor, *, mirrored: bool = False) -> Tensor:
    """Return the bulk effective sample size of each quantity, over all chains together (Vehtari et al. 2021).

    Args:
        draws: [M, S, k] draws of k quantities.
        mirrored: chain 2k + 1 had minus the noise of chain 2k, so a pair counts as one chain. This is the ESS of
            variances, and of every function with the same value on both sides of the mode. Means have a larger one.
    Returns:
        [k] float64. NaN where ESS is not defined: fewer than 4 draws, a NaN or infinite draw, a quantity that never
        changes, or an estimate at arviz's upper limit M S log10(M S), which is no estimate.
    """

    def of_one(column: Column) -> float:
        import arviz

        compute: Statistic = arviz.ess
        # for a quantity that never changes, arviz would return M * S
        found = math.nan if (column == column[0, 0]).all() else float(compute(column))
        return math.nan if found >= column.size * math.log10(column.size) * (1 - 1e-9) else found

    share = num_independent(len(draws), mirrored=mirrored) / max(1, len(draws))
    return share * _each(draws, of_one, name="ess", min_chains=1)


def unconverged(values: Tensor, *, max_rhat: float = MAX_RHAT, min_ess: float = MIN_ESS) -> str | None:
    """Return, in words, why the draws have not converged or are too few; None if they pass.

    Args:
        values: [M, S, k] values of k functions of theta. A function that never changes is ignored.
        max_rhat: the largest permitted R-hat.
        min_ess: the smallest permitted ESS of all chains together.
    """
    if not bool(values.isfinite().all()):
        return "not all draws are finite"
    ratios, sizes = rhat(values), ess(values)
    if bool(ratios.isnan().all()):
        return "R-hat is not defined: it needs at least 2 chains of 4 draws that vary"
    worst, smallest = float(ratios.nan_to_num(0.0, posinf=math.inf).max()), float(sizes.nan_to_num(math.inf).min())
    reasons = [f"R-hat {worst:.3g} where {max_rhat:g} is allowed"] * (worst > max_rhat)
    reasons += [f"ESS {smallest:.0f} where {min_ess:.0f} is needed"] * (smallest < min_ess)
    return ", ".join(reasons) or None


def require_converged(values: Tensor, what: str, *, max_rhat: float = MAX_RHAT, min_ess: float = MIN_ESS) -> None:
    """Check that draws have converged, before they serve as a reference for other draws.

    Args:
        values: see ``unconverged``.
        what: the name of the draws in the error.
        max_rhat, min_ess: see ``unconverged``.
    Raises:
        ValueError: if they have not converged, with the reasons.
    """
    reasons = unconverged(values, max_rhat=max_rhat, min_ess=min_ess)
    if reasons is not None:
        raise ValueError(f"{what} cannot serve as a reference: {reasons}. Use a longer burn-in and more draws")


def _each(draws: Tensor, of_one: Statistic, *, name: str, min_chains: int) -> Tensor:
    """Return the statistic of each quantity [M, S], as [k]. NaN where draws are too few or not all finite."""
    if draws.ndim != 3:
        raise ValueError(f"{name} needs draws of shape [M, S, k], got {list(draws.shape)}")
    enough = draws.shape[0] >= min_chains and draws.shape[1] >= 4
    columns = draws.detach().double().cpu().permute(2, 0, 1).numpy()
    with _quiet():
        values = [of_one(column) if enough and np.isfinite(column).all() else math.nan for column in columns]
    return torch.tensor(values, dtype=torch.float64)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of arviz about its future, many chains and constant draws, which are all handled here."""
    logger = logging.getLogger("arviz")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
