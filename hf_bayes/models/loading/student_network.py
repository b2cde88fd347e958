"""The network of a posterior that its distilled student reads."""

from __future__ import annotations

from torch import Tensor

from hf_bayes.posteriors.posterior import Posterior


def student_network(posterior: Posterior, members: int | None = None) -> Tensor:
    """Return the network [1, d] that the distilled student of a posterior reads.

    Raises:
        ValueError: if there is no student, or for a number of members, which a student does not have.
    """
    if posterior.student is None:
        raise ValueError(
            f"{posterior.source or 'this posterior'} has no distilled student: call hf_bayes.distil(posterior, rows), "
            "and save what it returns"
        )
    if members is not None:
        raise ValueError(
            f"members={members} with prediction='distilled': a student is a single network. Leave one of them out"
        )
    return network_of(posterior, posterior.config.student["network"])


def network_of(posterior: Posterior, name: str) -> Tensor:
    """Return a network [1, d], by its name in ``posteriors.student.NETWORKS``."""
    rows = posterior.approximation.rows
    return rows.mean(0, keepdim=True) if name == "mean" else rows[:1]
