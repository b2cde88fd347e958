"""Check that an energy is a function of theta and the batch, in which each chain's value depends on its own theta."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.core.rng import generator

MAX_CHANGE = 0.01
"""The change of an energy, in nats, allowed where there should be none: acceptance changes by 1 % at most."""

Values = Callable[[Tensor], Tensor]
"""theta [M, d] -> U [M] on one batch, NaN where the energy raises."""


def check_repeats(values: Values, theta: Tensor) -> Tensor:
    """Return U [M] at theta [M, d]; raise if a second call gives another energy, as one does that is random.

    A change of at most ``MAX_CHANGE`` and the rounding of a sum of 10,000 terms in another order is allowed.

    Raises:
        ValueError: naming the chain whose energy changes most.
    """
    first, again = values(theta), values(theta)
    change = (again - first).abs()
    same = (first == again) | (first.isnan() & again.isnan()) | (change <= _limit(first))
    if not bool(same.all()):
        worst = int(torch.where(same, 0, change.nan_to_num(torch.inf)).argmax())
        raise ValueError(
            "energy must return the same value in every call with one theta and one batch, got one that changes by "
            f"{float(change[worst]):.3g} nats for chain {worst}: it draws random numbers, or keeps a state. Give the "
            "minibatches as batches= and use the energy's second argument; for a module with dropout call eval()"
        )
    return first


def check_energy(values: Values, theta: Tensor, *, number: int) -> None:
    """Raise if the energy does not repeat itself, or if that of a chain changes with other chains' theta [M, d].

    A random half of the chains moves to the positions of their neighbours, and then the other half. Both times, the
    energies of the chains that do not move must stay the same, up to the limit of ``check_repeats``. Chains at one
    point pass this part.

    Args:
        number: of this check in its run; it seeds the choice of the half.
    Raises:
        ValueError: naming the chain whose energy changes most.
    """
    before, moved = check_repeats(values, theta), theta.roll(1, 0)
    if torch.equal(moved, theta):
        return
    order = torch.randperm(len(theta), generator=generator("coupling", number)).to(theta.device)
    half = order < len(theta) // 2
    for still in (half, ~half):
        change = (values(torch.where(still[:, None], theta, moved)) - before).abs()
        coupled = still & (change > _limit(before))
        if bool(coupled.any()):
            check_repeats(values, theta)  # a random energy may have given two equal values by chance
            worst = int(torch.where(coupled, change, 0).argmax())
            raise ValueError(
                f"energy must treat chains independently, got one that changes by {float(change[worst]):.3g} nats "
                f"for chain {worst} when only other chains move: row m of what it returns may depend on row m of "
                "theta alone. Sum over everything but the first axis"
            )


def _limit(energy: Tensor) -> Tensor:
    """Return the allowed change of each energy [M]."""
    return MAX_CHANGE + 100 * torch.finfo(energy.dtype).eps * energy.abs()
