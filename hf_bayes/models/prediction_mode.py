"""The state in which every method that predicts runs: no dropout, and one thread at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hf_bayes.members.evaluation_mode import evaluating

Predicting = TypeVar("Predicting", bound=Callable[..., Any])


def predicts(method: Predicting) -> Predicting:
    """Decorate a method that predicts, so that it never uses dropout, not even in training mode.

    A trainer leaves its model in training mode, as transformers' own trainer does. With dropout a prediction would be
    random and would not belong to any member, and its spread would not be the uncertainty of the weights. The mode of
    every module counts: ``model.model.train()`` leaves the mode of the outer model as it is.

    Threads wait for each other, also for a whole ``generate``. Otherwise one thread could read members that another
    thread has bound.
    """

    @functools.wraps(method)
    def predicting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.members.require_attached()
        with self.lock, evaluating(self):
            return method(self, *args, **kwargs)

    return cast(Predicting, predicting)
