"""The forwards of modules during a single pass: modules with random weights, norms, and activations of transformers.

All other modules keep their own forward, and torch calls the rules of ``Moments``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.members import compat
from hf_bayes.members.stacked import StackedConv1D, StackedLinear, StackedLora
from hf_bayes.members.stacked_module import Stacked
from hf_bayes.models.single_pass.activations import slope
from hf_bayes.models.single_pass.diagonal import Diagonal
from hf_bayes.models.single_pass.drawn import RandomModule, linear_tangents, lora_tangents
from hf_bayes.models.single_pass.factors import Factors, added_noise
from hf_bayes.models.single_pass.later import Later
from hf_bayes.models.single_pass.lora import lora_variance
from hf_bayes.models.single_pass.moments import Moments, mean_of
from hf_bayes.models.single_pass.norms import gain_of, rms_norm_variance
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
        self.own = own  # in the dtype of the model: the forward uses the same numbers as the model itself
        weight = own.get("weight", self.module.weight.detach())
        bias = own.get("bias", None if self.module.bias is None else self.module.bias.detach())
        random = {key: parts[name] for key, name in names.items()}
        if isinstance(self.module, Conv1D):
            weight, random["weight"] = weight.mT, transposed(random.get("weight"))
        dtype = _wide(weight.dtype)
        self.law = weight_law(
            weight.to(dtype), None if bias is None else bias.to(dtype), random.get("weight"), random.get("bias")
        )
        drawn = {key: draws[name].to(own[key]) for key, name in names.items() if name in draws}
        if isinstance(self.module, Conv1D) and "weight" in drawn:
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
        wide = x.to(self.law.mean.dtype)
        if isinstance(settings, Tangents):
            return linear_tangents(self, wide, noise, settings)
        if isinstance(settings, Factors):
            roots = x.new_zeros(0, *x.shape) if noise is None else noise.roots
            inputs = torch.cat([wide[None], roots.to(wide)])
            rows = inputs[:, :, None] if x.ndim == 2 else inputs
            transported = None if noise is None else settings.new(F.linear(roots.to(wide), self.law.mean))
            shape = torch.Size((*x.shape[:-1], len(self.law.mean)))
            return added_noise(self.factor * self.law.joint(rows), shape, transported, settings)
        before = None if noise is None else noise.variance
        added = self.factor * self.law.variance(wide, before)
        parts = [(added, _features(self.law.token_features(wide)))]
        if before is not None:
            parts.append((before @ self.square.mT, noise.features))
        total = sum(variance for variance, _ in parts)
        source = LinearSource(self.law.mean, before, wide, self.law, self.factor)
        return settings.new(total, blended(parts) if x.ndim == 3 else None, source)


class RandomLora:
    """A LoRA layer whose factors are random, on a frozen linear layer; arguments as of ``RandomLinear``."""

    def __init__(
        self, item: StackedLora, values: dict[str, Tensor], parts: dict[str, Any], factor: float,
        draws: dict[str, Tensor],
    ) -> None:  # fmt: skip
        self.module, names, self.factor = item.module, item.names, factor
        self.path = next(iter(names.values())).rpartition(".lora_")[0]
        self.scaling = self.module.scaling[item.adapter]
        base = self.module.base_layer
        if type(base) is not nn.Linear and not isinstance(base, Conv1D):
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
    def frozen(self) -> Tensor:
        """The weight [out, in] of the layer below the adapter."""
        weight = self.module.base_layer.weight.detach()
        return weight.mT if isinstance(self.module.base_layer, Conv1D) else weight

    @cached_property
    def whole(self) -> Tensor:
        """The weight [out, in] of the layer and its adapter at their means."""
        return self.frozen.to(self.low.mean.dtype) + self.scaling * self.high.mean @ self.low.mean

    @cached_property
    def square(self) -> Tensor:
        """The squares of ``whole``."""
        return self.whole.square()

    def mean(self, x: Tensor) -> Tensor:
        """Return the output of the layer at the mean of its factors, in the order of peft's own operations."""
        base: Tensor = self.module.base_layer(x)
        low = F.linear(x.to(self.own["lora_A"].dtype), self.own["lora_A"])
        return (base + F.linear(low, self.own["lora_B"]) * self.scaling).to(base.dtype)

    def spread(self, x: Tensor, noise: Any, settings: Settings) -> Any:
        """Return the spread of the output; see ``RandomLinear.spread``."""
        if isinstance(settings, Tangents):
            return lora_tangents(self, x, noise, settings)
        wide = x.to(self.low.mean.dtype)
        if isinstance(settings, Factors):
            return self._spread_by_factors(wide, noise, settings)
        before = None if noise is None else noise.variance
        of_low, of_high = (
            self.factor * part for part in lora_variance(wide, before, self.low, self.high, self.scaling)
        )
        low = wide @ self.low.mean.mT
        parts = [
            (of_low, _features(self.low.token_features(wide))),
            (of_high, _features(self.high.token_features(low))),
        ]
        if before is not None:
            parts.append((before @ self.square.mT, noise.features))
        return settings.new(sum(variance for variance, _ in parts), blended(parts) if x.ndim == 3 else None)

    def _spread_by_factors(self, wide: Tensor, noise: Any, settings: Factors) -> Factors:
        roots = wide.new_zeros(0, *wide.shape) if noise is None else noise.roots.to(wide)
        transported = None if noise is None else settings.new(F.linear(roots, self.whole))
        inputs = torch.cat([wide[None], roots])
        inputs = inputs[:, :, None] if wide.ndim == 2 else inputs
        rows, length, rank = inputs.shape[1], inputs.shape[2], len(self.low.mean)
        low_joint = self.low.joint(inputs)  # [B, T r, T r]
        four = low_joint.view(rows, length, rank, length, rank)
        b = self.high.mean
        through = torch.einsum("kr,btrsq,lq->btksl", b, four, b).reshape(rows, length * len(b), -1)
        values, vectors = torch.linalg.eigh(low_joint)
        fresh = (vectors * values.clamp_min(0).sqrt()[:, None]).permute(2, 0, 1).reshape(-1, rows, length, rank)
        low = torch.cat([F.linear(inputs, self.low.mean), fresh])
        joint = through + self.high.joint(low)
        shape = torch.Size((*wide.shape[:-1], len(b)))
        return added_noise(self.factor * self.scaling**2 * joint, shape, transported, settings)


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
        return RandomLora(item, values, parts, factor, draws)
    if isinstance(item, (StackedLinear, StackedConv1D)):
        return RandomLinear(item, values, parts, factor, draws, shared)
    if draws:
        return RandomModule(item, values, factor, draws)
    name = next(iter(item.names.values()))
    raise ValueError(
        f"{name}: this structure of a single pass has no rule for a random {type(item.module).__name__}. It supports "
        f"{SUPPORTED}. Choose structure='low_rank', freeze it, or predict by members"
    )


# -- frozen modules with a rule of their own -----------------------------------------------------------------------


def frozen_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a frozen module during a single pass; None if the module keeps its own."""
    if isinstance(module, Conv1D):
        return lambda x: _through(module, x, _conv1d)
    if _is_family_rms_norm(module):
        return lambda x: _through(module, x, _family_rms_norm)
    if type(module).__module__ == "transformers.activations":
        return lambda x: _through(module, x, _activation)
    return None


def _through(module: Any, x: Any, rule: Callable[..., Diagonal]) -> Any:
    forward = type(module).forward
    if not isinstance(x, Moments):
        return forward(module, x)
    mean, spread = mean_of(x), x.spread
    if isinstance(spread, Tangents):
        return Moments.of(forward(module, mean), _tangents_through(module, mean, spread))
    if isinstance(spread, Factors):
        # one operation for all columns, by the module's own forward
        found = spread.after(lambda value: forward(module, value), (x,), {}, None)
        return Moments.of(forward(module, mean), found)
    return Moments.of(forward(module, mean), rule(module, mean, spread))


def _tangents_through(module: Any, mean: Tensor, spread: Tangents) -> Tangents:
    forward = type(module).forward
    if isinstance(module, Conv1D):
        return spread.new(Later(lambda choose: spread.at(choose).roots), Outer(module.weight.detach().mT))
    if type(module).__module__ == "transformers.activations":
        return spread.by_element(lambda value: forward(module, value), mean)
    if not _is_family_rms_norm(module):
        return spread.by_row(lambda value: forward(module, value), mean)
    eps = _eps_of(module)
    return spread.by_norm(mean, gain_of(module, eps, mean), eps, centred=False)


def _conv1d(module: Any, mean: Tensor, spread: Diagonal) -> Diagonal:
    weight = module.weight.detach().to(spread.variance.dtype).mT
    return spread.new(spread.variance @ weight.square().mT, spread.features, LinearSource(weight, spread.variance))


def _family_rms_norm(module: Any, mean: Tensor, spread: Diagonal) -> Diagonal:
    eps = _eps_of(module)
    wide = mean.to(spread.variance.dtype)
    gain = gain_of(module, eps, mean).to(wide.dtype)
    return spread.new(rms_norm_variance(wide, spread.variance, gain, eps), spread.features)


def _is_family_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)


def _eps_of(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0))


def _activation(module: Any, mean: Tensor, spread: Diagonal) -> Diagonal:
    rate = slope(lambda x: type(module).forward(module, x), mean)
    return spread.new(spread.variance * rate.to(spread.variance.dtype).square(), spread.features)


def _features(features: Tensor) -> Tensor | None:
    return compressed(features) if features.ndim == 3 else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
