"""Rules that a test advances by hand, without a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_bayes.core.anchors import at_each_point
from hf_bayes.core.types import Evaluation, Rule


def evaluated(rule: Rule[Any], state: Any, theta: Tensor, evaluate: Callable[[Tensor], Evaluation]) -> Evaluation:
    """Return the evaluation at theta [M, d], with the gradients beside it that the next update of ``state`` needs."""
    found, anchor = evaluate(theta), rule.anchor(state)
    if anchor is None:
        return found
    return found._replace(anchor_grad=at_each_point(anchor, lambda point: evaluate(point).grad_log_lik))
