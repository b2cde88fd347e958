"""The method of a run for which none was chosen.

With few rows for each class the posterior at T = 1 predicts worse than its own mode, and with many it predicts best.
Held-out rows can tell: a ladder begins with the posterior itself, and continues with lower temperatures under the wider
prior that suits modes. Figures are in docs/results/recommend.md. Where no T can be chosen, a run trains a deep
ensemble: draws at T = 1 may predict much worse. So does a run that is too short for a ladder: a sampler would spend
most of such a run on its start.
"""

from __future__ import annotations

from typing import Any

from hf_bayes.core.config import MODE_PRIOR_SCALE, MethodConfig
from hf_bayes.methods.registry import METHODS

TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
"""One for each of four chains. The first is the posterior."""

DRAWS = 4
"""Draws of each chain. They cost nothing in training, and predictions with four members of a chain are smoother."""


LEAST_UPDATES = 107
"""With fewer updates, the burn-in after the warm start is too short for a ladder (``methods.ladder.LEAST_BURN_IN``)."""


def on_ladder(*, inherits: bool = False) -> MethodConfig:
    """Return SGHMC on the ladder.

    Args:
        inherits: True if the prior is another posterior, whose width stays.
    """
    scales = [1.0, *(MODE_PRIOR_SCALE for _ in TEMPERATURES[1:])]
    ladder = {"temperature": list(TEMPERATURES), **({} if inherits else {"prior_scale": scales})}
    fields: dict[str, Any] = {"num_chains": len(TEMPERATURES), "draws_per_chain": DRAWS, "ladder": ladder}
    return METHODS["sghmc"](**fields)


def recommended(
    num_heldout: int | None,
    *,
    num_updates: int | None = None,
    unit: str = "example",
    num_processes: int = 1,
    inherits: bool = False,
    packs: bool = False,
) -> tuple[MethodConfig, str]:
    """Return a method, and a sentence that says which.

    Args:
        num_heldout: the number of held-out rows; None if they cannot be counted, or there are none.
        num_updates: the updates of the run; None if they cannot be counted before it.
        unit: ``Task.unit``: a row of tokens says more than a row with one label.
        num_processes: a ladder compares its chains, so one process needs all of them.
        inherits: as for ``on_ladder``.
        packs: rows will be packed, so their number says nothing about the updates.
    """
    method, held = on_ladder(inherits=inherits), num_heldout or 0
    needs = method.requirements
    least, most = needs.least_rows(unit), needs.most_rows(unit)
    if num_updates is None and packs:
        reason = (
            f"packing changes the number of rows, so it is not known whether the run has the {LEAST_UPDATES} updates "
            "that SGHMC needs. Give max_steps"
        )
    elif num_updates is not None and num_updates < LEAST_UPDATES:
        reason = f"the run has {num_updates} updates, and SGHMC needs {LEAST_UPDATES}. Train longer"
    elif num_processes > 1:
        one = "the temperature T of SGHMC is chosen in a run of one process"
        reason = f"there are {num_processes} processes, and {one}. Give a method"
    elif held < least:
        reason = (
            f"the temperature T of SGHMC is chosen on {least} held-out rows or more (got {held}). Hold out more "
            "(eval_dataset, or --validation_fraction of hf-bayes)"
        )
    else:
        number = f"{most} of {held}" if most is not None and most < held else f"{held}"
        rungs = ", ".join(f"{value:g}" for value in TEMPERATURES)
        return method, f"no method was given: SGHMC, and {number} held-out rows choose T of {rungs}"
    return (
        METHODS["ensemble"](num_chains=method.num_chains),
        f"no method was given: a deep ensemble of {method.num_chains}, because {reason} for draws of the posterior",
    )
