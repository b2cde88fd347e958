"""Where code may come from: the base model's repository, with ``trust_remote_code=True``, and nowhere else."""

from __future__ import annotations

import os

from hf_bayes.artifact import Posterior


def refuse_own_code(posterior: Posterior, base_model: str) -> None:
    """Raise if the base model, whose code is trusted, lies in the posterior's own directory or repository.

    Args:
        base_model: its name or path; empty where the posterior names none.
    Raises:
        ValueError: naming both.
    """
    source = posterior.source
    if source is None or not base_model:
        return
    own, base = os.path.realpath(source), os.path.realpath(base_model)
    inside = os.path.isdir(own) and os.path.commonpath([own, base]) == own
    if inside or base_model.lower() == source.lower():
        raise ValueError(
            f"{source} names {base_model} as its base model, which lies in the posterior itself: a posterior never "
            "brings code. Leave trust_remote_code=True out, or give the base model's own folder or repository as "
            "base_model="
        )
