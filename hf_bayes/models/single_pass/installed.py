"""The forwards of modules during a single pass: modules with random weights, norms, and activations of transformers.

All other modules keep their own forward, and torch calls the rules of ``GaussianTensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.core import compat
from hf_bayes.members.stacked import StackedConv1D, StackedLinear, StackedLora
from hf_bayes.members.stacked_module import Stacked
from hf_bayes.models.single_pass.activations import derivative
from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.drawn import RandomModule, linear_tangents, lora_tangents
from hf_bayes.models.single_pass.factors import Factors, linear_factors, lora_factors
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor, mean_of, spread_of
from hf_bayes.models.single_pass.later import Later
from hf_bayes.models.single_pass.lora import lora_variance
from hf_bayes.models.single_pass.norms import eps_of, gain_of, rms_norm_variance
from hf_bayes.models.single_pass.outer import Outer
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.tangents import Tangents
from hf_bayes.models.single_pass.token_correlation import blended, compressed
from hf_bayes.models.single_pass.weight_laws import transposed, weight_law

SUPPORTED = "torch.nn.Linear, transformers' Conv1D, and peft LoRA on one of them"

Settings = Any
"""A spread without noise, which has the settings of the pass."""


class RandomLinear:
    """A linear layer whose weight or bias is random.

    Args:
        item: the stacked module, which has the names of its parameters.
        values: {name: mean of the parameter}.
        parts: {name: covariance of the parameter}, of ``weight_laws.parts_of``.
        factor: the calibration factor of the layer's noise.
        draws: {name: [S, *shape] draws of its noise over sqrt(S)}; empty for structures without draws.
        shared: the number of draws that are leading columns, of which ``parts`` are free.
    """

    def __init__(
        self, item: Stacked, values: dict[str, Tensor], parts: dict[str, Any], factor: float,
        draws: dict[str, Tensor], shared: int = 0,
    ) -> None:  # fmt: skip
        self.module, names, self.shared = item.module, item.names, shared
        self.path = next(iter(names.values())).rpartition(".")[0]
        self.factor = factor
        own = {key: values[name].to(item.parameter(key)) for key, name in names.items()}
        self.transposed = isinstance(self.module, Conv1D)
        self.own = own  # in the dtype of the model: the forward uses the same numbers as the model itself
        weight = own.get("weight", self.module.weight.detach())
        bias = own.get("bias", None if self.module.bias is None else self.module.bias.detach())
        random = {key: parts[name] for key, name in names.items()}
        if self.transposed:
            weight, random["weight"] = weight.mT, transposed(random.get("weight"))
        dtype = _wide(weight.dtype)
        self.law = weight_law(
            weight.to(dtype), None if bias is None else bias.to(dtype), random.get("weight"), random.get("bias")
        )
        drawn = {key: draws[name].to(own[key]) for key, name in names.items() if name in draws}
        if self.transposed and "weight" in drawn:
            drawn["weight"] = drawn["weight"].mT
        self.draws = drawn.get("weight"), drawn.get("bias")

    @cached_property
    def square(self) -> Tensor:
        """The squares of the mean weight."""
        return self.law.mean.square()

    def mean(self, x: Tensor) -> Tensor:
        """Return the output of the layer at the mean of its weights."""
        return compat.forward_with(self.module, self.own, x)

    def spread(self, x: Tensor, noise: Any, settings: Settings) -> Any:
        """Return the spread of the output for an input with mean ``x`` and spread ``noise``; None is no spread."""
        return _LINEAR_RULES[type(settings)](self, x.to(self.law.mean.dtype), noise, settings)


class RandomLora:
    """A LoRA layer whose factors are random, on a linear layer; arguments as of ``RandomLinear``.

    Attributes:
        base: the layer below the adapter, if its weight or bias is random, too (peft's ``bias="lora_only"``); set by
            ``joined``. Its noise is part of the noise of this layer.
    """

    def __init__(
        self, item: StackedLora, values: dict[str, Tensor], parts: dict[str, Any], factor: float,
        draws: dict[str, Tensor], shared: int = 0,
    ) -> None:  # fmt: skip
        self.module, names, self.factor, self.shared = item.module, item.names, factor, shared
        self.path = next(iter(names.values())).rpartition(".lora_")[0]
        self.adapter = item.adapter
        self.base: RandomLinear | None = None
        self._weights: dict[str, Any] = {}
        base = self.module.base_layer
        self.transposed = isinstance(base, Conv1D)
        if type(base) is not nn.Linear and not self.transposed:
            raise ValueError(
                f"{self.path}: a single pass needs the weight of the layer below the adapter, got "
                f"{type(base).__module__}.{type(base).__name__}. It supports {SUPPORTED}. Predict by members"
            )
        weights = {key: item.parameter(key).detach() for key in ("lora_A", "lora_B")}
        self.own = weights | {key: values[name].to(weights[key]) for key, name in names.items()}
        dtype = _wide(weights["lora_A"].dtype)
        self.low, self.high = (
            weight_law(self.own[key].to(dtype), None, parts.get(names.get(key, "")), None)
            for key in ("lora_A", "lora_B")
        )
        self.draws = {key: draws[name].to(self.own[key]) for key, name in names.items() if name in draws}

    @property
    def scaling(self) -> float:
        """The scaling of the adapter; 0 within ``model.disable_adapter()``, where the adapter has no noise either."""
        return 0.0 if self.module.disable_adapters else float(self.module.scaling[self.adapter])

    @property
    def below(self) -> Tensor:
        """The weight [out, in] of the layer below the adapter, at its mean."""
        if self.base is not None:
            return self.base.law.mean
        weight = self.module.base_layer.weight.detach()
        return weight.mT if self.transposed else weight  # type: ignore[no-any-return]

    @property
    def whole(self) -> Tensor:
        """The weight [out, in] of the layer and its adapter at their means."""
        scaling = self.scaling
        dtype = self.low.mean.dtype
        return self._kept("whole", lambda: self.below.to(dtype) + scaling * self.high.mean @ self.low.mean)

    @property
    def square(self) -> Tensor:
        """The squares of ``whole``."""
        return self._kept("square", lambda: self.whole.square())

    def _kept(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a matrix that is computed once for each value of ``scaling``."""
        if self._weights.get("scaling") != (scaling := self.scaling):
            self._weights = {"scaling": scaling}
        if name not in self._weights:
            self._weights[name] = make()
        found: Tensor = self._weights[name]
        return found

    def mean(self, x: Tensor) -> Tensor:
        """Return the output of the layer at the mean of its factors, in the order of peft's own operations.

        Raises:
            ValueError: for an adapter that has been merged.
        """
        if self.module.merged:
            raise ValueError(
                f"{self.path}: its adapter has been merged into the base model, and a single pass would add the "
                "adapter once more. Call unmerge_adapter() first"
            )
        base: Tensor = self.module.base_layer(x) if self.base is None else self.base.mean(x)
        if self.module.disable_adapters:
            return base
        low = F.linear(x.to(self.own["lora_A"].dtype), self.own["lora_A"])
        return (base + F.linear(low, self.own["lora_B"]) * self.scaling).to(base.dtype)

    def spread(self, x: Tensor, noise: Any, settings: Settings) -> Any:
        """Return the spread of the output; see ``RandomLinear.spread``."""
        return _LORA_RULES[type(settings)](self, x, noise, settings)


def _linear_diagonal(
    layer: RandomLinear, x: Tensor, noise: DiagonalSpread | None, settings: DiagonalSpread
) -> DiagonalSpread:
    before = None if noise is None else noise.variance
    parts = [_added(layer, x, before)]
    if noise is not None:
        parts.append((noise.variance @ layer.square.mT, noise.features))
    source = LinearSource(layer.law.mean, before, x, layer.law, layer.factor)
    return settings.new(_total(parts), blended(parts) if x.ndim == 3 else None, source)


def _lora_diagonal(
    layer: RandomLora, x: Tensor, noise: DiagonalSpread | None, settings: DiagonalSpread
) -> DiagonalSpread:
    x = x.to(layer.low.mean.dtype)
    before = None if noise is None else noise.variance
    of_low, of_high = (layer.factor * part for part in lora_variance(x, before, layer.low, layer.high, layer.scaling))
    low = x @ layer.low.mean.mT
    parts = [
        (of_low, _features(layer.low.token_features(x))),
        (of_high, _features(layer.high.token_features(low))),
    ]
    if noise is not None:
        parts.append((noise.variance @ layer.square.mT, noise.features))
    if layer.base is not None:
        parts.append(_added(layer.base, x, before))
    return settings.new(_total(parts), blended(parts) if x.ndim == 3 else None)


def _added(layer: RandomLinear, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the variance that the noise of the layer's weights adds, and the features of its tokens."""
    return layer.factor * layer.law.variance(x, before), _features(layer.law.token_features(x))


def _lora_tangents(layer: RandomLora, x: Tensor, noise: Tangents | None, settings: Tangents) -> Tangents:
    found, base = lora_tangents(layer, x, noise, settings), layer.base
    if base is None:
        return found
    own = LinearSource(base.law.mean, None, x.to(base.law.mean.dtype), base.law, base.factor)
    before = None if noise is None else Later(lambda choose: noise.at(choose).moved)
    # a weight of 0: ``lora_tangents`` already transports the noise of the input
    added = settings.new(before, Outer(torch.zeros_like(base.law.mean), own, base.draws, shared=base.shared))
    return settings.new(Later(lambda choose: found.at(choose).moved + added.at(choose).moved))


_LINEAR_RULES: dict[type, Callable[..., Any]] = {
    DiagonalSpread: _linear_diagonal,
    Factors: linear_factors,
    Tangents: linear_tangents,
}
"""Structure -> (layer, mean of the input, its noise, settings) -> the spread of a random linear layer's output."""

_LORA_RULES: dict[type, Callable[..., Any]] = {
    DiagonalSpread: _lora_diagonal,
    Factors: lora_factors,
    Tangents: _lora_tangents,
}
"""The same for random LoRA layers."""


def random_module(
    item: Stacked,
    values: dict[str, Tensor],
    parts: dict[str, Any],
    factor: float,
    draws: dict[str, Tensor],
    shared: int = 0,
) -> Any:
    """Return the replacement of a module with random weights.

    Raises:
        ValueError: naming a module without a rule.
    """
    if isinstance(item, StackedLora):
        return RandomLora(item, values, parts, factor, draws, shared)
    if isinstance(item, (StackedLinear, StackedConv1D)):
        return RandomLinear(item, values, parts, factor, draws, shared)
    if draws:
        return RandomModule(item, values, factor, draws)
    name = next(iter(item.names.values()))
    raise ValueError(
        f"{name}: this structure of a single pass has no rule for a random {type(item.module).__name__}. It supports "
        f"{SUPPORTED}. Choose structure='low_rank', freeze it, or predict by members"
    )


def joined(modules: list[Any]) -> list[Any]:
    """Return the replacements of modules, after each LoRA layer has got the random layer below its adapter."""
    linear = {id(one.module): one for one in modules if isinstance(one, RandomLinear)}
    for one in modules:
        if isinstance(one, RandomLora):
            one.base = linear.get(id(one.module.base_layer))
    return modules


# -- frozen modules with a rule of their own -----------------------------------------------------------------------


Rules = dict[type, Callable[[Any, Tensor, Any], Any]]
"""Structure -> (module, mean of the input, its spread) -> the spread of the output."""


def frozen_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a frozen module during a single pass; None if the module keeps its own."""
    # a partial copies its module with the model; a deep copy of a closure would compute with the original's module
    if isinstance(module, Conv1D):
        return partial(_through, _CONV1D, module)
    if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
        return partial(_through, _FAMILY_RMS_NORM, module)
    if type(module).__module__ == "transformers.activations":
        return partial(_through, _ACTIVATION, module)
    return None


def _through(rules: Rules, module: Any, x: Any) -> Any:
    forward, spread = type(module).forward, spread_of(x)
    if spread is None:
        return forward(module, x)
    mean = mean_of(x)
    return GaussianTensor.of(forward(module, mean), rules[type(spread)](module, mean, spread))


def _factors(module: Any, mean: Tensor, spread: Factors) -> Any:
    """One operation for all columns, by the module's own forward."""
    return spread.after(lambda value: type(module).forward(module, value), (GaussianTensor.of(mean, spread),), {}, None)


def _conv1d_diagonal(module: Any, mean: Tensor, spread: DiagonalSpread) -> DiagonalSpread:
    weight = module.weight.detach().to(spread.variance.dtype).mT
    return spread.new(spread.variance @ weight.square().mT, spread.features, LinearSource(weight, spread.variance))


def _conv1d_tangents(module: Any, mean: Tensor, spread: Tangents) -> Tangents:
    return spread.new(Later(lambda choose: spread.at(choose).moved), Outer(module.weight.detach().mT))


def _rms_norm_diagonal(module: Any, mean: Tensor, spread: DiagonalSpread) -> DiagonalSpread:
    eps = eps_of(module)
    wide = mean.to(spread.variance.dtype)
    gain = gain_of(module, eps, mean).to(wide.dtype)
    return spread.new(rms_norm_variance(wide, spread.variance, gain, eps), spread.features)


def _rms_norm_tangents(module: Any, mean: Tensor, spread: Tangents) -> Tangents:
    eps = eps_of(module)
    return spread.by_norm(mean, gain_of(module, eps, mean), eps, centred=False)


def _activation_diagonal(module: Any, mean: Tensor, spread: DiagonalSpread) -> DiagonalSpread:
    rate = derivative(lambda x: type(module).forward(module, x), mean)
    return spread.new(spread.variance * rate.to(spread.variance.dtype).square(), spread.features)


def _activation_tangents(module: Any, mean: Tensor, spread: Tangents) -> Tangents:
    return spread.by_element(lambda value: type(module).forward(module, value), mean)


_CONV1D: Rules = {DiagonalSpread: _conv1d_diagonal, Factors: _factors, Tangents: _conv1d_tangents}
_FAMILY_RMS_NORM: Rules = {DiagonalSpread: _rms_norm_diagonal, Factors: _factors, Tangents: _rms_norm_tangents}
_ACTIVATION: Rules = {DiagonalSpread: _activation_diagonal, Factors: _factors, Tangents: _activation_tangents}


def _features(features: Tensor) -> Tensor | None:
    return compressed(features) if features.ndim == 3 else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _total(parts: list[tuple[Tensor, Tensor | None]]) -> Any:
    return sum(variance for variance, _ in parts)
