"""The interface of the result of a curvature pass, as the Laplace method reads it."""

from __future__ import annotations

from typing import Any, Protocol, Self

from hf_bayes.methods.laplace.curvature import Curvature
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate


class PassResult(Protocol):
    """The result of one pass over the data at one point theta*, on the scale of the full data (a NamedTuple)."""

    @property
    def curvature(self) -> Curvature:
        """H of -log p(D | theta)."""
        ...

    @property
    def log_lik(self) -> float:
        """log p(D | theta*) in nats."""
        ...

    @property
    def gradient(self) -> GradientEstimate | None:
        """The gradient of log p(D | theta); None if it was not requested."""
        ...

    @property
    def fallbacks(self) -> dict[str, str]:
        """{parameter: the reason for which only a diagonal of its curvature is kept}."""
        ...

    def _replace(self, *args: Any, **kwargs: Any) -> Self: ...
