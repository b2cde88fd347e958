"""A tensor that is Gaussian: its values are the mean, and ``spread`` is its covariance.

``GaussianTensor`` goes through a model's own code in place of an ordinary tensor. torch calls ``__torch_function__``
for every operation on it. The mean is the result of the same operation on ordinary tensors. So a posterior without
variance gives the model's own outputs, bit for bit. The spread comes from the rule that its structure has for the
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.core.compat import plain_tensor_functions


class NoRule(ValueError):
    """An operation on an uncertain tensor for which a structure has no rule.

    Attributes:
        what: the operation.
        spread: the spread of the uncertain tensor; None if it is not known.
    """

    spread: Any = None

    def __init__(self, what: str) -> None:
        super().__init__(f"a single pass has no rule for {what}: predict by members")
        self.what = what


class Spread(Protocol):
    """A structure of the covariance of a tensor."""

    @property
    def variance(self) -> Tensor:
        """The variances, in the shape of the mean."""
        ...

    def covariance(self) -> Tensor:
        """Return [..., C, C], the covariance between the last dimension's elements of a tensor [..., C]."""
        ...

    def after(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the spread of each tensor in ``result``: one spread, a list of spreads, or None for no noise.

        Args:
            function: the operation of torch.
            args, kwargs: its arguments, some of them Gaussian tensors.
            result: its result for the means.
        Raises:
            NoRule: if the structure has no rule for the operation.
        """
        ...


class GaussianTensor(Tensor):
    """A Gaussian tensor.

    Attributes:
        spread: a ``Spread``, the structure of its covariance.
    """

    spread: Any

    @staticmethod
    def of(mean: Tensor, spread: Spread) -> GaussianTensor:
        """Return a tensor with this mean and spread."""
        found: GaussianTensor = mean.as_subclass(GaussianTensor)
        found.spread = spread
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plain_tensor_functions():
            if func is Tensor.__deepcopy__:
                # spreads are never written into, and a copy must refer to the same noise as its original
                return GaussianTensor.of(mean_of(args[0]).clone(), args[0].spread)
            if func in _IN_PLACE:
                raise _no_rule(f"{name_of(func)} (it writes in place)", _spread_in(args, kwargs))
            result = func(*replaced(args, mean_of), **replaced(kwargs, mean_of))
            if func in _NOISELESS or not _is_floating(result) or (func in _LIKE and spread_of(args[0]) is None):
                return result
            spread = _spread_behind(func, args, kwargs, result)
        if isinstance(result, Tensor):
            return result if spread is None else GaussianTensor.of(result, spread)
        pairs = zip(result, spread, strict=True)
        return type(result)(
            GaussianTensor.of(each, own) if own is not None and each.is_floating_point() else each
            for each, own in pairs  # ``topk`` returns indices, too
        )


def _spread_in(args: Any, kwargs: Any) -> Any:
    """Return the spread of the first Gaussian tensor among the arguments."""
    return next(gaussian_tensors_in((args, kwargs))).spread


def _spread_behind(function: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the spread of a result, by the rule that the structure of the arguments has for the operation.

    Raises:
        NoRule: also for an operation that torch does not differentiate.
    """
    own = _spread_in(args, kwargs)
    try:
        return own.after(function, args, kwargs, result)
    except NoRule as error:
        error.spread = own
        raise
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise _no_rule(f"{name_of(function)} ({reason})", own) from error


def _no_rule(what: str, spread: Any) -> NoRule:
    error = NoRule(what)
    error.spread = spread
    return error


_NOISELESS = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
}
"""Operations that read the shape of a tensor and not its values."""


_LIKE = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}
"""Operations that give a tensor the type or the shape of another one: the values of the other one are not read."""


_IN_PLACE = {
    Tensor.__setitem__,
    Tensor.copy_,
    Tensor.mul_,
    Tensor.__imul__,
    Tensor.div_,
    Tensor.masked_fill_,
    Tensor.clamp_,
    Tensor.index_add_,
    Tensor.index_copy_,
}
"""Operations that would change the mean and not the spread."""


def mean_of(value: Any) -> Any:
    """Return the mean of a Gaussian tensor, and other values unchanged."""
    return value.as_subclass(Tensor) if isinstance(value, GaussianTensor) else value


def spread_of(value: Any) -> Any:
    """Return the spread of a Gaussian tensor; None for other values, which have no noise."""
    return value.spread if isinstance(value, GaussianTensor) else None


def name_of(function: Any) -> str:
    """Return the name of an operation of torch for an error."""
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function))


# -- the arguments and the results of an operation ---------------------------------------------------------------------


def gaussian_tensors_in(value: Any) -> Iterator[Any]:
    """Yield the Gaussian tensors among nested arguments, in order."""
    match value:
        case GaussianTensor():
            yield value
        case dict():
            yield from gaussian_tensors_in(tuple(value.values()))
        case tuple() | list():
            for item in value:
                yield from gaussian_tensors_in(item)


def replaced(value: Any, change: Callable[[GaussianTensor], Any]) -> Any:
    """Return nested arguments with ``change`` of each Gaussian tensor in its place; it is called in order."""
    match value:
        case GaussianTensor():
            return change(value)
        case dict():
            return {name: replaced(item, change) for name, item in value.items()}
        case tuple() | list():
            return type(value)(replaced(item, change) for item in value)
    return value


def for_each_tensor(result: Any, make: Callable[[Tensor], Any]) -> Any:
    """Return ``make`` of a tensor, or the list of ``make`` of each of several tensors."""
    return make(result) if isinstance(result, Tensor) else [make(part) for part in result]


def _is_floating(result: Any) -> bool:
    """Check for a floating point tensor, or several."""
    several = result if isinstance(result, (tuple, list)) else (result,)
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in several)
