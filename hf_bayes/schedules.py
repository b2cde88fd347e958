"""When draws are taken."""

from __future__ import annotations


def burn_in_steps(burn_in: float, num_steps: int) -> int:
    """``burn_in`` as a number of updates: a fraction of the run if below 1."""
    return int(burn_in * num_steps) if burn_in < 1 else int(burn_in)


def draw_steps(num_steps: int, *, burn_in: int, draws: int, thin: int | None) -> tuple[int, ...]:
    """The updates (counted from 1) after which a draw is taken; the last one is the last update.

    Args:
        num_steps: updates in the run.
        burn_in: updates before the first draw.
        draws: how many.
        thin: updates between draws; None spreads them evenly over the updates after burn-in.
    Raises:
        ValueError: if the run is too short for these draws.
    """
    spacing = thin if thin is not None else (num_steps - burn_in) // draws
    first = num_steps - spacing * (draws - 1)
    if spacing < 1 or first <= burn_in:
        raise ValueError(
            f"{num_steps} updates with burn_in={burn_in} and thin={thin} cannot give {draws} draws per chain "
            f"(would collect {max(0, (num_steps - burn_in) // max(spacing, 1))}): train longer, or lower burn_in, thin "
            "or draws_per_chain"
        )
    return tuple(first + spacing * i for i in range(draws))
