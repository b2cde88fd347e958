"""The objective of a run: the only way from theta to numbers of the model or energy that is sampled."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hf_bayes.core.types import DataPasses, Evaluation, Info


class FailureWords(NamedTuple):
    """The words of an error about a number that is not finite.

    Attributes:
        value: the name of the objective's value, such as "energy".
        gradient: the name of its gradient.
        step: the name of an update, "step" or "update".
        advice: the text after the colon, which says what to do.
        cause: a sentence that ends the message and says what may have happened; it is empty, or begins with a full stop
            and a space.
    """

    value: str
    gradient: str
    step: str
    advice: str
    cause: str = ""


class UpdateObjective(Protocol):
    """The objective on the batches of one update. It is a ``core.types.Evaluate`` with two additions."""

    def __call__(
        self,
        theta: Tensor,
        *,
        gradient: bool = True,
        batches: slice | None = None,
        split_rows: bool = False,
        anchor: Tensor | None = None,
    ) -> Evaluation:
        """Return log-likelihood and gradient at ``theta`` [M, d].

        Args:
            gradient: compute the gradient, too.
            batches: a part of the update's batches; None takes all of them.
            split_rows: estimate the variance of the gradient of a single batch from two parts of its rows.
            anchor: [M, d] or [M, J, d] points at which the gradient on these batches is computed, too.
        """
        ...

    def info(self) -> Info:
        """Return diagnostics of the evaluations so far, name -> [M]."""
        ...


class Objective(DataPasses, Protocol):
    """A log-likelihood that chains are run on: ``EnergyObjective`` of an energy, ``ModelObjective`` of a model.

    Beside updates it makes the further passes over the data that a method needs (``core.types.DataPasses``).
    """

    words: FailureWords

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> UpdateObjective:
        """Return the objective on the batches of one update.

        Args:
            step: updates that the run has done before this one.
            inside: [M, d] points inside the support, for methods that reject points outside it.
        """
        ...

    def place_of(self, column: int) -> str:
        """Return ", " and the name of the parameter that holds a column of theta; "" where it has no name."""
        ...
