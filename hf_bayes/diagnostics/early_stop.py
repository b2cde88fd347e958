"""The check of a run that was stopped before its end."""

from __future__ import annotations

from hf_bayes.diagnostics.measurements import Measurements


def check_stop(run: Measurements) -> str | None:
    """Return a complaint if a sampler was stopped before its first draw. Draws from before a stop are draws."""
    if not run.has_no_draws:
        return None
    return (
        f"stopped at update {run.stopped_at} of {run.num_planned_updates}, before sampling: these are no draws of the "
        "posterior; let the run make all of its updates"
    )
