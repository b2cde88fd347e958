"""The objective of an update, as a kernel calls it: it keeps the losses that a run reports."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_bayes.chains.objective import UpdateObjective
from hf_bayes.core.types import Evaluation


class WatchedObjective:
    """An update's objective that keeps the loss of its first and of its last evaluation.

    Args:
        evaluate: the objective.
        check: called with theta and the evaluation there, of the first evaluation only.

    Attributes:
        first, last: [M] the losses; None before an evaluation, and for an objective without terms.
    """

    def __init__(self, evaluate: UpdateObjective, check: Callable[[Tensor, Evaluation], None] | None = None) -> None:
        self._evaluate, self._check = evaluate, check
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.info = evaluate.info

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        evaluation = self._evaluate(theta, gradient=gradient, batches=batches)
        if self._check is not None:
            self._check(theta, evaluation)
            self._check = None
        self.last = evaluation.loss
        self.first = self.last if self.first is None else self.first
        return evaluation
