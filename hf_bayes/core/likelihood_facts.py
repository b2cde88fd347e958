"""The facts about a run's likelihood that decide how curvature is computed, and whether noise can be fitted."""

from __future__ import annotations

from typing import NamedTuple


class LikelihoodFacts(NamedTuple):
    """The facts about the likelihood of a run's data.

    Attributes:
        most_terms: the largest number of likelihood terms in one row of the data; None if they were not counted.
        root_columns: number of columns of R, where R R' is the Fisher information of one likelihood term in the model's
            outputs (``Likelihood.num_root_columns``); None if it is not known.
        noise_std: the noise standard deviation of a regression; None for other likelihoods.
        lacks: the functions that curvature may need and that the likelihood does not have: "draw", "fisher", or both.
    """

    most_terms: int | None = None
    root_columns: int | None = None
    noise_std: float | None = None
    lacks: frozenset[str] = frozenset()

    @property
    def exact_vjps(self) -> int | None:
        """The vector-Jacobian products that the exact GGN takes for the largest row; None if that is not known."""
        if self.most_terms is None or self.root_columns is None:
            return None
        return self.most_terms * self.root_columns


UNKNOWN = LikelihoodFacts()
"""The facts about an energy, which has no likelihood terms, and about a likelihood before its terms are counted."""
