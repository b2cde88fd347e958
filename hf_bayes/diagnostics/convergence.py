"""Do chains agree, and how many draws are they worth? R-hat and ESS, by arviz.

Both are meant for functions of theta (the log-likelihood of probe texts, say): coordinates of a LoRA have symmetries
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
from torch import Tensor

MAX_RHAT = 1.05
"""Vehtari et al. (2021) ask for 1.01 in final results, which 29 % of quantities exceed at 4 chains of 50 independent
draws; 0.2 % exceed 1.05."""

MIN_ESS_PER_CHAIN = 50.0
"""Half of what Vehtari et al. (2021) ask for before R-hat and ESS themselves are trusted: 400 of four chains, which is
50 of each half of a chain."""


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
