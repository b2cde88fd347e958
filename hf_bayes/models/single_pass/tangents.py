"""A covariance of low rank, F F': the columns of F are tangents of the network along draws of the weights.

A draw d_s ~ N(0, V) of all random weights together moves a hidden state h by J d_s to first order. With S draws and
F = [J d_1, ..., J d_S] / sqrt(S), E F F' = J V J': no covariance is dropped, neither between units, tokens and layers
nor between a branch and its skip connection. The same draws serve all rows and tokens, so a cache can hold columns. The
variance of a logit has a relative standard error of sqrt(2 / S), which is largely common to similar inputs.

Below the columns there is one more row, the drift of the mean: an estimate of E h - h(mean weights) to second order in
the noise. Norms, activations, products and attention add to it; all other operations transport it. It does not count as
a column. Wherever a rule reads the mean of a wide hidden state, it reads mean + drift: a norm divides the noise by the
expected size, and if its mean were not smaller, too, the next norm would find a size that no member has.

Outputs of a linear layer keep the columns of its input: see ``outer``. So the noise of a random head is exact, and the
covariance of the logits of a large vocabulary is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass import attention
from hf_bayes.models.single_pass.factors import pushed
from hf_bayes.models.single_pass.gaussian_tensor import (
    NoRule,
    for_each_tensor,
    gaussian_tensors_in,
    mean_of,
    name_of,
    spread_of,
)
from hf_bayes.models.single_pass.later import Choose, Later, everything, rows_of
from hf_bayes.models.single_pass.operations import (
    ACTIVATIONS,
    ARRANGEMENTS,
    CONVERSIONS,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    SUMS,
    as_tuple,
    certain_weight,
    is_one_number,
    num_uncertain,
)
from hf_bayes.models.single_pass.outer import Outer
from hf_bayes.models.single_pass.second_order import attention_columns, element_columns, product_columns
from hf_bayes.models.single_pass.wide_norms import norm_columns
from hf_bayes.uncertainty.likelihoods import widened


@dataclass(frozen=True, eq=False)
class Tangents:
    """The columns F of a root of the covariance.

    Attributes:
        held: the columns and the drift [S + 1, *shape of the mean], now or later. With ``outer``: [S + 1, ..., n] of
            the layer's input, or None if it has no noise.
        outer: the last linear layer, if the tensor is its output; else None.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
        shared: the number of columns, the first ones, that are leading columns and no draws (``drawn``).
    """

    held: Tensor | Later | None
    outer: Outer | None = None
    deterministic_scores: bool = False
    shared: int = 0

    @property
    def values(self) -> Tensor | None:
        """The state that is held."""
        return self.held.value if isinstance(self.held, Later) else self.held

    @cached_property
    def moved(self) -> Tensor:
        """The columns and the drift [S + 1, *shape of the mean], also for outputs of a linear layer."""
        found = self.values if self.outer is None else self.outer.columns(self.values)
        assert found is not None
        return found

    @property
    def roots(self) -> Tensor:
        """The columns [S, *shape of the mean]."""
        return self.moved[:-1]

    @property
    def drift(self) -> Tensor:
        """The drift of the mean, in its shape."""
        return self.moved[-1] if self.outer is None else self.outer.drift(self.values)

    @property
    def variance(self) -> Tensor:
        """The variances, in the shape of the mean."""
        if self.outer is None:
            return widened(self.roots).square().sum(0)
        return self.outer.variance(self.values)

    def covariance(self) -> Tensor:
        """Return [..., C, C]."""
        if self.outer is None:
            roots = widened(self.roots)
            return torch.einsum("s...k,s...l->...kl", roots, roots)
        return self.outer.covariance(self.values)

    def times(self, vectors: Tensor) -> Tensor:
        """Return [..., C], the covariance times ``vectors`` [..., C], without forming it."""
        outer = self.outer or Outer(None)
        return outer.times(self.values, vectors)

    def new(self, held: Tensor | Later | None, outer: Outer | None = None) -> Tangents:
        """Return a spread with the same settings."""
        return Tangents(held, outer, self.deterministic_scores, self.shared)

    def at(self, choose: Choose) -> Tangents:
        """Return the spread at chosen rows."""
        if choose is everything:
            return self
        held = rows_of(self.held, choose) if isinstance(self.held, Tensor) else self.held and self.held.at(choose)
        return self.new(held, None if self.outer is None else self.outer.leading(choose))

    def by_element(self, function: Callable[[Tensor], Tensor], mean: Tensor) -> Tangents:
        """Return the spread behind an elementwise function, for an input with this mean."""
        return self.new(Later(lambda to: element_columns(function, to(mean), self.at(to).moved)))

    def by_norm(self, mean: Tensor, gain: Tensor | None, eps: float, *, centred: bool) -> Tangents:
        """Return the spread behind a LayerNorm (``centred``) or an RMSNorm, for an input with this mean."""
        how: dict[str, Any] = {"centred": centred, "shared": self.shared}
        return self.new(Later(lambda to: norm_columns(to(mean), self.at(to).moved, gain, eps, **how)))

    def after(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the spread of the result; see ``Spread``."""
        if (self.outer is not None or isinstance(self.held, Later)) and spread_of(args[0]) is not None:
            kept = _kept(self, function, args, result)
            if kept is not None:
                return kept
        rule = _RULES.get(function)
        if rule is not None:
            return rule(self, function, args, kwargs, result)
        return for_each_tensor(_pushed(function, args, kwargs), self.new)


Rule = Callable[[Tangents, Callable[..., Any], Any, dict[str, Any], Any], Any]
_RULES: dict[Any, Rule] = {}


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


# -- outputs of a linear layer that stay such outputs, and columns to be computed later -------------------------------


def _kept(own: Tangents, function: Any, args: Any, result: Any) -> Tangents | None:
    """Return the spread in another arrangement, precision or scale; None if it needs columns of its own.

    A random head therefore has its exact noise also in models that choose a token or scale the logits after it.
    """
    if not isinstance(result, Tensor) or result.shape[-1:] != args[0].shape[-1:] or result.ndim < 2:
        return None
    if function in CONVERSIONS:
        return own if result.device == args[0].device and own.outer is not None else None
    if function in RESHAPES and result.numel() == args[0].numel():
        lead = result.shape[:-1]
        return own.at(lambda part: part.reshape(*lead, part.shape[-1]))
    if function is Tensor.__getitem__ and _is_of_leading(args[1], args[0].ndim):
        return own.at(lambda part: part[args[1]])
    if function in (*PRODUCTS, *QUOTIENTS) and own.outer is not None and is_one_number(args[1]):
        factor = 1 / args[1] if function in QUOTIENTS else args[1]
        return own.new(own.held, replace(own.outer, gain=own.outer.gain * factor))
    return None


def _is_of_leading(index: Any, num_dims: int) -> bool:
    """Check that an index chooses in the leading dimensions only, and keeps the last one."""
    each = as_tuple(index)
    return len(each) < num_dims and not any(item is Ellipsis or item is None for item in each)


# -- rules that are faster than forward-mode differentiation -----------------------------------------------------------


@_rule(
    *ARRANGEMENTS, *CONVERSIONS, Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind,
    Tensor.__getitem__, Tensor.select, torch.select, Tensor.narrow, torch.narrow, Tensor.index_select,
    torch.index_select, Tensor.repeat_interleave, torch.repeat_interleave, Tensor.neg, Tensor.__neg__, torch.neg,
    torch.mean, Tensor.mean, torch.sum, Tensor.sum,
)  # fmt: skip
def _same_for_columns(own: Tangents, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Linear functions of one tensor."""
    return for_each_tensor(torch.vmap(lambda column: function(column, *args[1:], **kwargs))(own.moved), own.new)


@_rule(torch.cat, torch.concat)
def _joined(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    tensors = args[0] if args else kwargs["tensors"]
    count = len(own.moved)
    # an empty cache is one tensor without elements
    parts = [
        x.new_zeros(1, *x.shape).expand(count, *x.shape) if spread is None else spread.moved
        for x, spread in zip(tensors, map(spread_of, tensors), strict=True)
        if x.numel()
    ]
    return own.new(torch.cat([part.to(result.dtype) for part in parts], dim % result.ndim + 1))


@_rule(F.dropout, torch.dropout)
def _dropped(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    if kwargs.get("training", args[2] if len(args) > 2 else True):
        raise NoRule("dropout in training mode")
    return own


@_rule(*SUMS)
def _sum(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    if kwargs.get("alpha", 1) != 1:
        raise NoRule(f"{name_of(function)} with alpha")
    name = name_of(function)
    signs = (-1, 1) if "rsub" in name else (1, -1) if "sub" in name else (1, 1)
    if _are_aligned(args, result):
        both = [(sign, x.spread) for sign, x in zip(signs, args, strict=True)]
        return own.new(Later(lambda choose: _signed_sum([(sign, x.at(choose).moved) for sign, x in both])))
    parts = [sign * _beside(x, result) for sign, x in zip(signs, args, strict=True) if spread_of(x) is not None]
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return own.new(total.expand(-1, *result.shape))


def _signed_sum(parts: list[tuple[int, Tensor]]) -> Tensor:
    (first_sign, first), (second_sign, second) = parts
    return torch.add(first if first_sign == 1 else -first, second, alpha=second_sign)


@_rule(*PRODUCTS)
def _product(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    first, second = args
    if _are_aligned(args, result):
        x, dx, y, dy = mean_of(first), first.spread, mean_of(second), second.spread
        return own.new(Later(lambda to: product_columns(to(x), dx.at(to).moved, to(y), dy.at(to).moved)))
    pairs = ((first, second), (second, first))
    parts = [_beside(x, result) * mean_of(other) for x, other in pairs if spread_of(x) is not None]
    return own.new(parts[0] if len(parts) == 1 else parts[0] + parts[1])


def _are_aligned(args: Any, result: Tensor) -> bool:
    """Check that all arguments are uncertain, and that none is broadcast to the shape of the result."""
    return all(spread_of(x) is not None and x.shape == result.shape for x in args)


def _beside(value: Any, result: Tensor) -> Tensor:
    """Return columns with as many dimensions as ``result`` after the first, so that they broadcast."""
    moved: Tensor = value.spread.moved.to(result.dtype)
    return moved.reshape(len(moved), *[1] * (result.ndim - moved.ndim + 1), *moved.shape[1:])


def _pushed(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the columns and the drift by forward-mode differentiation."""
    return pushed(function, args, kwargs, [x.spread.moved for x in gaussian_tensors_in((args, kwargs))])


@_rule(F.linear)
def _linear(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    weight = certain_weight(args, kwargs)
    before: Tensor | Later | None = Later(lambda to: own.at(to).moved) if own.outer is not None else own.held
    return own.new(before, Outer(weight.detach()))


@_rule(F.layer_norm)
def _layer_norm(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    return _norm(own, function, args, kwargs, centred=True)


@_rule(F.rms_norm)
def _rms_norm(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    return _norm(own, function, args, kwargs, centred=False)


def _norm(own: Tangents, function: Any, args: Any, kwargs: Any, *, centred: bool) -> Tangents:
    names = ("input", "normalized_shape", "weight", *(["bias"] if centred else []), "eps")
    given = {"weight": None, "bias": None, "eps": 1e-5} | dict(zip(names, args, strict=False)) | kwargs
    x, gain, eps = mean_of(given["input"]), given["weight"], given["eps"]
    if len(given["normalized_shape"]) > 1 or num_uncertain((given["weight"], given["bias"])):
        return own.new(_pushed(function, args, kwargs))
    eps = torch.finfo(x.dtype).eps if eps is None else eps  # the default of torch's RMSNorm
    return own.by_norm(x, gain, eps, centred=centred)


@_rule(*ACTIVATIONS)
def _elementwise(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents:
    options = {name: value for name, value in kwargs.items() if name != "inplace"}
    rest = args[1:] if function not in (F.relu, F.silu) else ()  # their second argument is ``inplace``
    return own.by_element(lambda x: function(x, *rest, **options), mean_of(args[0]))


@_rule(F.softmax, torch.softmax, Tensor.softmax)
def _softmax(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents | None:
    if own.deterministic_scores and result.ndim == 4:  # the scores of eager attention
        return None
    return own.new(_pushed(function, args, kwargs))


@_rule(F.scaled_dot_product_attention)
def _attention(own: Tangents, function: Any, args: Any, kwargs: Any, result: Tensor) -> Tangents | None:
    """Return the tangent of softmax(scale q k') v: a dv + (a (ds - a . ds)) v with ds = scale (dq k' + q dk')."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    (q, dq), (k, dk), (v, dv) = (_heads(given[name], given["query"].shape[1]) for name in names[:3])
    scale = given.get("scale") or q.shape[-1] ** -0.5
    if own.deterministic_scores:
        dq = dk = None
    if dq is None and dk is None and dv is None:
        return None

    def weights(query: Tensor, key: Tensor) -> Tensor:
        return attention.weights_of(query, key, given.get("attn_mask"), scale, causal=bool(given.get("is_causal")))

    return own.new(attention_columns(weights, scale, (q, dq), (k, dk), (v, dv), own.shared))


def _heads(value: Tensor, num_heads: int) -> tuple[Tensor, Tensor | None]:
    """Return the mean and the columns of queries, keys or values, one of them for each query head."""
    repeats = num_heads // value.shape[1]
    mean, spread = mean_of(value), spread_of(value)
    columns = None if spread is None else spread.moved
    if repeats == 1:
        return mean, columns
    return mean.repeat_interleave(repeats, 1), None if columns is None else columns.repeat_interleave(repeats, 2)
