"""Independent elements, with one variance each, and a correlation between tokens that all units share.

This is the structure for large models. It drops the covariance between the units of a token. The outputs of a linear
layer keep it: ``LinearSource`` remembers the layer's input, from which the covariance of logits is computed on request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass import attention, norms
from hf_bayes.models.single_pass.activations import derivative, product_variance
from hf_bayes.models.single_pass.gaussian_tensor import NoRule, gaussian_tensors_in, mean_of, name_of, spread_of
from hf_bayes.models.single_pass.operations import (
    ACTIVATIONS,
    ARRANGEMENTS,
    CONVERSIONS,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    SOFTMAX,
    SUMS,
    as_tuple,
    certain_weight,
    index_of_each,
    is_one_number,
    num_uncertain,
)
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.token_correlation import blended, chosen, position_dim, unit


@dataclass(frozen=True, eq=False)
class DiagonalSpread:
    """Independent elements.

    Attributes:
        variance: in the shape of the mean, in float32 or wider.
        features: [B, T, q] of the noise of tokens (``token_correlation``); None if tokens are independent.
        source: the last linear layer, if the tensor is its output; else None.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
    """

    variance: Tensor
    features: Tensor | None = None
    source: LinearSource | None = None
    deterministic_scores: bool = False

    def after(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the spread of the result; see ``Spread``."""
        rule = _RULES.get(function)
        if rule is None:
            raise NoRule(name_of(function))
        return rule(self, function, args, kwargs, result)

    def covariance(self) -> Tensor:
        """Return [..., C, C]."""
        return torch.diag_embed(self.variance) if self.source is None else self.source.covariance()

    def times(self, vectors: Tensor) -> Tensor:
        """Return [..., C], the covariance times ``vectors`` [..., C], without forming it."""
        return self.variance * vectors if self.source is None else self.source.times(vectors)

    def new(
        self, variance: Tensor, features: Tensor | None = None, source: LinearSource | None = None
    ) -> DiagonalSpread:
        """Return a spread with the same settings."""
        return DiagonalSpread(variance, features, source, self.deterministic_scores)


Rule = Callable[[DiagonalSpread, Callable[..., Any], Any, dict[str, Any], Any], Any]
_RULES: dict[Any, Rule] = {}


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def variance_of(value: Any) -> Any:
    """Return the variance of a Gaussian tensor; 0 for other tensors and numbers."""
    spread = spread_of(value)
    return 0.0 if spread is None else spread.variance


# -- the same elements in another arrangement ---------------------------------------------------------------------


@_rule(*ARRANGEMENTS)
def _arranged(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    found = function(own.variance, *args[1:], **kwargs)
    source, features = own.source, own.features
    keeps_outputs = source is not None and result.ndim and result.shape[-1] == len(source.weight)
    if source is not None:
        lead = result.shape[:-1]
        same = keeps_outputs and lead.numel() == own.variance.shape[:-1].numel()
        source = (
            source.leading(lambda part: part.reshape(*lead, part.shape[-1])) if same and function in RESHAPES else None
        )
    if features is not None and function is Tensor.repeat:
        features = None
    elif features is not None and _merges_positions(own.variance, result):
        features = unit(features.mean(1, keepdim=True))
    return own.new(found, features, source)


def _merges_positions(before: Tensor, after: Tensor) -> bool:
    """Check for transformers' rearrangement of the query heads of one token, which stand in place of positions."""
    return (
        before.ndim == after.ndim == 4 and before.shape[2] > 1 == after.shape[2] and before.shape[3] == after.shape[3]
    )


@_rule(*CONVERSIONS)
def _converted(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    device = result.device
    if own.variance.device == device:
        return own
    return own.new(own.variance.to(device), None if own.features is None else own.features.to(device))


@_rule(Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind)
def _pieces(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Any) -> list[DiagonalSpread]:
    rows = own.features is not None and all(piece.shape[:2] == own.features.shape[:2] for piece in result)
    return [own.new(piece, own.features if rows else None) for piece in function(own.variance, *args[1:], **kwargs)]


@_rule(Tensor.__getitem__, Tensor.select, torch.select, Tensor.narrow, torch.narrow)
def _chosen(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    found = function(own.variance, *args[1:], **kwargs)
    source = None
    if own.source is not None and function is Tensor.__getitem__ and result.shape[-1:] == own.variance.shape[-1:]:
        index = as_tuple(args[1])
        if len(index) < own.variance.ndim and not any(item is Ellipsis for item in index):
            source = own.source.leading(lambda part: part[args[1]])
    features, each = own.features, index_of_each(function, args, own.variance.ndim)
    if features is not None:
        features = None if each is None else chosen(features, own.variance.shape, each, result.shape)
    return own.new(found, features, source)


@_rule(Tensor.index_select, torch.index_select, Tensor.repeat_interleave, torch.repeat_interleave)
def _of_rows(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    dim = args[1] if "index_select" in name_of(function) else kwargs.get("dim", args[2] if len(args) > 2 else None)
    features = own.features
    if features is not None and dim == 0:
        features = function(features, *args[1:], **kwargs)
    elif features is not None and "index_select" in name_of(function):
        of_positions = dim % own.variance.ndim == position_dim(features, own.variance.shape)
        features = features.index_select(1, args[2]) if of_positions else features
    return own.new(function(own.variance, *args[1:], **kwargs), features)


@_rule(torch.cat, torch.concat)
def _joined(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    tensors = args[0] if args else kwargs["tensors"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    found = [
        torch.zeros_like(x, dtype=own.variance.dtype) if spread is None else spread.variance
        for x, spread in zip(tensors, map(spread_of, tensors), strict=True)
    ]
    features = [x.spread.features for x in gaussian_tensors_in(tensors)]
    both = None
    if all(part is not None for part in features) and len(features) == sum(x.numel() > 0 for x in tensors):
        axis = dim % result.ndim
        if axis == result.ndim - 1:
            both = features[0]  # two halves of a head, in rotary embeddings
        elif axis in (0, result.ndim - 2):
            both = torch.cat(features, 0 if axis == 0 else 1)
    return own.new(torch.cat(found, dim), both)


@_rule(torch.where, Tensor.where, Tensor.masked_fill, torch.masked_fill)
def _masked(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    if "masked_fill" in name_of(function):
        found = own.variance.masked_fill(args[1], 0.0)
    else:
        condition, yes, no = args if function is torch.where else (args[1], args[0], args[2])
        found = torch.where(condition, variance_of(yes), variance_of(no))
    return own.new(found.expand(result.shape), own.features)


@_rule(F.dropout, torch.dropout)
def _dropped(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    if training:
        raise NoRule("dropout in training mode")
    return own


# -- sums and products ----------------------------------------------------------------------------------------------


@_rule(*SUMS, Tensor.neg, Tensor.__neg__, torch.neg)
def _sum(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    if kwargs.get("alpha", 1) != 1:
        raise NoRule(f"{name_of(function)} with alpha")
    random = list(gaussian_tensors_in(args))
    found = sum(variance_of(value) for value in args)
    if len(random) == 1:
        source = own.source if result.shape == own.variance.shape else None
        return own.new(found.expand(result.shape), own.features, source)
    same = all(value.shape == result.shape and result.ndim == 3 for value in random)
    parts = [(value.spread.variance, value.spread.features) for value in random]
    return own.new(found.expand(result.shape), blended(parts) if same else None)


@_rule(*PRODUCTS, *QUOTIENTS)
def _product(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    first, second = args
    if function in QUOTIENTS:
        if spread_of(second) is not None:
            raise NoRule("division by an uncertain tensor")
        second = 1 / second
    if num_uncertain(args) == 2:
        means, variances = (mean_of(first), mean_of(second)), (variance_of(first), variance_of(second))
        return own.new(product_variance(means[0], variances[0], means[1], variances[1]), own.features)
    factor = first if spread_of(first) is None else second
    source = None
    if own.source is not None and is_one_number(factor):
        source = own.source.scaled(factor)
    return own.new((own.variance * factor**2).expand(result.shape), own.features, source)


@_rule(F.linear)
def _linear(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    wide = certain_weight(args, kwargs).detach().to(own.variance.dtype)
    return own.new(own.variance @ wide.square().mT, own.features, LinearSource(wide, own.variance))


@_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
def _matmul(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread | None:
    first, second = args
    if num_uncertain(args) == 2:
        return None  # scores of attention, from queries and keys at their means (eq. 59)
    if spread_of(first) is not None:
        return own.new(own.variance @ second.detach().to(own.variance.dtype).square(), own.features)
    weights = first.to(own.variance.dtype)
    fits = own.features is not None and own.variance.ndim == 4 and own.features.shape[1] == own.variance.shape[2]
    found, features = attention.value_noise(weights, own.variance, own.features if fits else None)
    return own.new(found, None if features is None else unit(features))


@_rule(*SOFTMAX)
def _softmax(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
    if result.ndim != 4:  # in attention [B, H, T, S] scores are taken at their means (eq. 59)
        raise NoRule(f"{name_of(function)} outside of attention")


@_rule(torch.mean, Tensor.mean, torch.sum, Tensor.sum)
def _reduced(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keep = kwargs.get("keepdim", False)
    if not isinstance(dim, int):
        raise NoRule(f"{name_of(function)} over {dim}")
    count = own.variance.shape[dim] if "mean" in name_of(function) else 1
    if own.features is not None and own.variance.ndim == 3 and dim % 3 == 1:
        columns = own.variance.sqrt()[..., None] * own.features[:, :, None]
        found = columns.sum(1, keepdim=keep).square().sum(-1)
    else:
        found = own.variance.sum(dim, keepdim=keep)
    return own.new(found / count**2)


# -- functions of one tensor ------------------------------------------------------------------------------------------


@_rule(*ACTIVATIONS)
def _elementwise(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    options = {name: value for name, value in kwargs.items() if name != "inplace"}
    rest = args[1:] if function not in (F.relu, F.silu) else ()  # their second argument is ``inplace``
    rate = derivative(lambda x: function(x, *rest, **options), mean_of(args[0]))
    return own.new(own.variance * rate.to(own.variance.dtype).square(), own.features)


@_rule(F.layer_norm, torch.layer_norm)
def _layer_norm(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(given["normalized_shape"]) != 1:
        raise NoRule("layer_norm over several dimensions")
    wide = mean_of(args[0]).to(own.variance.dtype)
    found = norms.layer_norm_variance(wide, own.variance, given.get("weight"), given.get("eps", 1e-5))
    return own.new(found, own.features)


@_rule(F.rms_norm, torch.rms_norm)
def _rms_norm(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread:
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    mean = mean_of(args[0])
    eps = given.get("eps") or torch.finfo(mean.dtype).eps
    found = norms.rms_norm_variance(mean.to(own.variance.dtype), own.variance, given.get("weight"), eps)
    return own.new(found, own.features)


@_rule(F.scaled_dot_product_attention)
def _attention(own: DiagonalSpread, function: Any, args: Any, kwargs: Any, result: Tensor) -> DiagonalSpread | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    dtype = own.variance.dtype
    query, key, value = (_heads(given[name], given["query"].shape[1], dtype) for name in names[:3])
    scale = given.get("scale") or query[0].shape[-1] ** -0.5
    causal = bool(given.get("is_causal"))
    weights = attention.weights_of(query[0], key[0], given.get("attn_mask"), scale, causal=causal)
    found: Any = torch.zeros_like(result, dtype=dtype)
    parts: list[tuple[Tensor, Tensor | None]] = []
    if value[1] is not None:
        noise, features = attention.value_noise(weights, value[1], value[2])
        found = found + noise
        parts.append((_tokens_first(noise), None if features is None else unit(features)))
    if not own.deterministic_scores and query[1] is not None:
        noise = attention.query_noise(weights, value[0], key[0], query[1], scale)
        found = found + noise
        parts.append((_tokens_first(noise), query[2]))
    if not own.deterministic_scores and key[1] is not None:
        noise = attention.key_noise(weights, query[0], value[0], key[1], key[2], scale)
        found = found + noise
        parts.append((_tokens_first(noise), query[2]))
    return own.new(found, blended(parts)) if parts else None


def _heads(value: Tensor, num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mean, the variance and the features of queries, keys or values, one of them for each query head."""
    repeats = num_heads // value.shape[1]
    mean = mean_of(value).to(dtype).repeat_interleave(repeats, 1)
    spread = spread_of(value)
    if spread is None:
        return mean, None, None
    features = spread.features
    fits = features is not None and features.shape[1] == mean.shape[2]
    return mean, spread.variance.repeat_interleave(repeats, 1), features if fits else None


def _tokens_first(variance: Tensor) -> Tensor:
    """Return [B, T, H * d] of [B, H, T, d]."""
    return variance.transpose(1, 2).flatten(2)
