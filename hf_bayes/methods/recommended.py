"""The method of a run for which none was chosen.

With few rows for each class the posterior at T = 1 predicts worse than its own mode, and with many it predicts best.
Held-out rows can tell: a ladder begins with the posterior itself, and continues with lower temperatures under the wider
prior that suits modes. Figures are in docs/results/recommend.md. A run that is too short for a ladder trains a deep
ensemble: a sampler would spend most of such a run on its start.
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
) -> tuple[MethodConfig, str]:
    """Return a method, and a sentence that says which.

    Args:
        num_heldout: the number of held-out rows; None if they cannot be counted, or there are none.
        num_updates: the updates of the run; None if they cannot be counted before it.
        unit: ``Task.unit``: a row of tokens says more than a row with one label.
        num_processes: a ladder compares its chains, so one process needs all of them.
        inherits: as for ``on_ladder``.
    """
    method = on_ladder(inherits=inherits)
    if num_updates is not None and num_updates < LEAST_UPDATES:
        return (
            METHODS["ensemble"](num_chains=method.num_chains),
            f"no method was given: a deep ensemble of {method.num_chains}, because the run has {num_updates} updates, "
            f"and SGHMC needs {LEAST_UPDATES}. Train longer for draws from the posterior",
        )
    least, rungs = method.requirements.least_rows(unit), ", ".join(f"{value:g}" for value in TEMPERATURES)
    if num_processes > 1:
        reason = f"there are {num_processes} processes, and only a run in one process chooses T on held-out rows"
    elif (num_heldout or 0) < least:
        reason = f"a run with at least {least} held-out rows (got {num_heldout or 0}) would choose T on them"
    else:
        most = method.requirements.most_rows(unit)
        number = f"{most} of {num_heldout}" if most is not None and most < (num_heldout or 0) else f"{num_heldout}"
        return method, f"no method was given: SGHMC, and {number} held-out rows choose T of {rungs}"
    return (
        METHODS["sghmc"](num_chains=method.num_chains, draws_per_chain=DRAWS),
        f"no method was given: SGHMC at the temperature T = 1; {reason}. With few rows for each class a lower T "
        "predicts better",
    )
