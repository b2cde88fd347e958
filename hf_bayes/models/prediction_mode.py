"""The state in which every method that predicts runs: no dropout, and one thread at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from hf_bayes.members.evaluation_mode import evaluating

Predicting = TypeVar("Predicting", bound=Callable[..., Any])


def predicts(method: Predicting) -> Predicting:
    """Decorate a model's method that predicts, so that it never drops anything out, not even in training mode.

    A trainer leaves its model in training mode, as transformers' own trainer does. With dropout a prediction would be
    random and by the weights of no member, and its spread would say nothing about the uncertainty of the weights.

    Threads wait for each other, also for a whole ``generate``: one thread would read the members that another binds.
    """

    @functools.wraps(method)
    def predicting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.members.require_attached()
        with self.lock, nullcontext() if not self.training else evaluating(self):
            return method(self, *args, **kwargs)

    return cast(Predicting, predicting)
