"""Checks of an energy: each chain's value depends on its own theta, and for exact kernels it repeats itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.core.rng import generator

MAX_CHANGE = 0.01
"""The change of an energy, in nats, allowed where there should be none: acceptance changes by 1 % at most."""

Values = Callable[[Tensor], Tensor]
"""theta [M, d] -> U [M] on one batch, NaN where the energy raises."""


def check_energy(values: Values, theta: Tensor, *, exact: bool, number: int) -> None:
    """Raise for an energy that is not what a method needs at theta [M, d].

    An exact kernel needs an energy that repeats itself. For a stochastic-gradient method a random energy is a noisy
    gradient, and whether its chains are independent cannot be seen.

    Chains must be independent: a random half of them moves to the positions of their neighbours, and then the other
    half. Both times, the energies of the chains that do not move must stay the same. A change of at most
    ``MAX_CHANGE`` and the rounding of a sum of 10,000 terms in another order is allowed. Chains at one point pass.

    Args:
        exact: the method is an exact kernel.
        number: the number of this check in its run; it seeds the choice of the half.
    Raises:
        ValueError: naming the chain whose energy changes most.
    """
    moved = theta.roll(1, 0)
    together = torch.equal(moved, theta)  # one chain, or chains at one point
    if together and not exact:
        return
    before = values(theta)
    if not _repeats(values, theta, before, exact=exact) or together:
        return
    order = torch.randperm(len(theta), generator=generator("coupling", number)).to(theta.device)
    half = order < len(theta) // 2
    for still in (half, ~half):
        change = (values(torch.where(still[:, None], theta, moved)) - before).abs()
        coupled = still & (change > _limit(before))
        # a random energy may have given two equal values by chance
        if bool(coupled.any()) and _repeats(values, theta, before, exact=exact):
            worst = int(torch.where(coupled, change, 0).argmax())
            raise ValueError(
                f"energy must treat chains independently, got one that changes by {float(change[worst]):.3g} nats "
                f"for chain {worst} when only other chains move: row m of what it returns may depend on row m of "
                "theta alone. Sum over everything but the first axis"
            )


def _repeats(values: Values, theta: Tensor, before: Tensor, *, exact: bool) -> bool:
    """Return whether another call gives the energies ``before`` [M] again; for an exact kernel raise if not."""
    again = values(theta)
    change = (again - before).abs()
    same = (before == again) | (before.isnan() & again.isnan()) | (change <= _limit(before))
    if exact and not bool(same.all()):
        worst = int(torch.where(same, 0, change.nan_to_num(torch.inf)).argmax())
        raise ValueError(
            "an exact method needs an energy that returns the same value in every call with one theta, got one that "
            f"changes by {float(change[worst]):.3g} nats for chain {worst}: it draws random numbers, or keeps a state. "
            "Use all rows in every call, call eval() on a module with dropout, or use a stochastic-gradient method"
        )
    return bool(same.all())


def _limit(energy: Tensor) -> Tensor:
    """Return the allowed change of each energy [M]."""
    return MAX_CHANGE + 100 * torch.finfo(energy.dtype).eps * energy.abs()
