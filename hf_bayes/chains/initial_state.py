"""Initial values of the chains' state beside theta, given by the caller: momenta, frictions, step sizes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.theta_form import Form
from hf_bayes.core.number_checks import is_finite_number
from hf_bayes.core.tensors import shape_in_words
from hf_bayes.core.types import Kernel, Rule


def with_initial_state(
    method: Rule[Any] | Kernel[Any], given: Any, form: Form[Any], *, name: str
) -> Rule[Any] | Kernel[Any]:
    """Return the method with given initial values of some fields of its state.

    The other fields have their usual initial values, and fields that theta determines cannot be given: an energy of
    other points would let a kernel reject all moves. The generators advance as usual, too: a momentum is drawn, and
    then replaced by the given one.

    Args:
        method: the rule or kernel.
        given: field of the method's State -> its value for all chains: a number, or a tensor [M, ...]. A field with the
            shape of theta may be a dictionary if theta is one. Or a whole State, whose theta is ignored, with all that
            is computed from it.
        form: the form of theta.
        name: the name of the method, for errors.
    """
    computed = {"theta"} | (set(method.functions_of_theta) if isinstance(method, Kernel) else set())
    if hasattr(given, "_asdict"):
        given = {field: value for field, value in given._asdict().items() if field not in computed}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"state must map fields of the state of {name} to tensors, or be such a state, got {type(given).__name__}"
        )
    init: Callable[..., Any] = method.init

    def begin(*arguments: Any) -> Any:
        state = init(*arguments)
        fields = [field for field in state._fields if field not in computed]
        unknown = sorted(set(given) - set(fields))
        if unknown:
            hint = ""
            if computed.intersection(unknown):
                hint = ": theta is an argument of its own" if "theta" in unknown else ": theta determines it"
            raise ValueError(f"the state of {name} has no field {', '.join(unknown)} to give{hint}; it has {fields}")
        values = {field: _value(field, value, getattr(state, field), form) for field, value in given.items()}
        return state._replace(**values)

    return method._replace(init=begin)


def _value(field: str, value: Any, like: Tensor, form: Form[Any]) -> Tensor:
    """Return the value of a field of the state, with the shape, dtype and device of ``like``."""
    if isinstance(value, Mapping) and form.layout is not None:
        value = form.layout.flatten(value)
    if is_finite_number(value):
        return torch.full_like(like, value)
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise ValueError(
            f"state[{field!r}] must be a number or a tensor {list(like.shape)}, got {shape_in_words(value)}"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(f"state[{field!r}] has elements that are not finite")
    return value.detach().to(like, copy=True)
