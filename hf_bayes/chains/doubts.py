"""Warnings about the chains of ``sample``: chains that stand still, raise exceptions, or disagree."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.diagnostics.convergence import MAX_RHAT, rhat, rhat_by_chance

MAX_LOOKED_AT = 32
"""The largest number of coordinates whose R-hat is computed."""


def warn_of_doubts(
    method: MethodConfig,
    info: dict[str, Tensor],
    draws: Tensor,
    *,
    burn_in: int,
    first_error: Exception | None,
    own_step_size: bool,
) -> None:
    """Warn of chains that accepted nothing, raised exceptions, or disagree where they should not.

    Args:
        method: the config.
        info: name -> [num_steps, M], the diagnostics of all updates.
        draws: [M, S, d].
        burn_in: updates before the first draw.
        first_error: the first exception that was taken for a point outside the support.
        own_step_size: the run chose the step size, so the user did not judge it.
    """
    _warn_of_refusals(method.name, info, burn_in)
    _warn_of_exceptions(method.name, info, first_error)
    if method.requirements.all_data_in_every_update or own_step_size:
        _warn_of_disagreement(method.name, draws)


def _warn_of_refusals(name: str, info: dict[str, Tensor], burn_in: int) -> None:
    """Warn of chains of an accept-reject kernel that have probably not moved since burn-in."""
    if "acceptance" not in info:
        return
    acceptance = info["acceptance"][burn_in:].double()
    still = (acceptance.sum(0) < 0.05).nonzero().flatten().tolist()  # bounds the probability that any was accepted
    if still:
        highest = acceptance.mean(0)[still].max().item()
        warnings.warn(
            f"{name}: {len(still)} of {acceptance.shape[1]} chains (the first is {still[0]}) accept nothing after "
            f"burn-in, their mean acceptance in {len(acceptance)} moves is {highest:.2g} at most: their draws repeat "
            "one point. Use a smaller learning_rate (or the step of the method's config), a longer burn-in, or "
            "starting points of higher probability",
            stacklevel=4,
        )


def _warn_of_exceptions(name: str, info: dict[str, Tensor], first_error: Exception | None) -> None:
    """Warn of points that were taken as outside the support because the energy raised an exception."""
    if first_error is None:
        return
    raised = info["energy_raised"]
    where = f"in {int(raised.sum())} of {raised.numel()} moves, which were rejected as outside the support"
    if not bool(raised.any()):
        where = (
            "in the search for a first step size, at points that were taken as outside the support, and in none of "
            f"{raised.numel()} moves"
        )
    warnings.warn(
        f"{name}: the energy raised an exception {where}. The first was {type(first_error).__name__}: "
        f"{first_error!s:.200}",
        stacklevel=4,
    )


def _warn_of_disagreement(name: str, draws: Tensor) -> None:
    """Warn if the R-hat of coordinates shows that the chains [M, S, d] have not converged."""
    num_chains, num_draws, dim = draws.shape
    if num_chains < 2 or num_draws < 4:
        return
    looked_at = torch.arange(0, dim, -(-dim // MAX_LOOKED_AT))
    ratios = rhat(draws[..., looked_at]).nan_to_num(0.0, posinf=math.inf)  # a coordinate that never changes has none
    worst = int(ratios.argmax())
    by_chance = rhat_by_chance(num_chains, num_draws, probability=1 - 1e-3 / len(looked_at))
    if float(ratios[worst]) > max(MAX_RHAT, by_chance):
        warnings.warn(
            f"{name}: R-hat {float(ratios[worst]):.3g} of coordinate {int(looked_at[worst])} over {num_chains} chains "
            f"of {num_draws} draws, {MAX_RHAT:g} is allowed: the chains have not converged. Give them a longer "
            "burn-in and more draws (if the law has several modes: compare functions that have the same values in all "
            "modes, by hf_bayes.diagnostics.convergence.unconverged)",
            stacklevel=4,
        )
