"""The prior over theta that a method's config describes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout, is_dense
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import GaussianPrior, IndependentPrior, LaplacePrior

PRIORS: dict[str, type[IndependentPrior]] = {"gaussian": GaussianPrior, "he": GaussianPrior, "laplace": LaplacePrior}
"""``MethodConfig.prior`` -> the family of an element's density."""

LORA_EFFECT = 1.0
"""The default prior's standard deviation of Delta W, over the RMS of the base weight."""


def build_prior(
    config: MethodConfig, layout: Layout, start: Tensor, model: nn.Module, inherited: Gaussian | None = None
) -> IndependentPrior | Gaussian:
    """Return the prior that a config describes, or an inherited posterior in its place.

    "he" multiplies ``prior_std`` by sqrt(2 / fan-in). Without a ``prior_std`` the factors of LoRA have ``lora_stds``.

    Args:
        config: its ``prior_std`` may map regular expressions on names to stds; each name must match exactly one.
        layout: the layout of theta.
        start: [d] the initial weights; they are the prior mean if ``prior_mean="initial"``.
        model: the model; the fan-in of a matrix is read from its modules.
        inherited: the posterior of an earlier run, which replaces the prior of the config.
    Raises:
        ValueError: if a name matches no expression or several, or an expression matches no name.
    """
    if inherited is not None:
        return inherited.to(start)
    given = prior_stds(config, layout, model)
    default = config.prior_std is None and isinstance(given, dict)
    stds = [given[name] if default else _std_of(name, given) for name in layout.names]
    if (by_expression := config.prior_std_by_expression) is not None:
        idle = [pattern for pattern in by_expression if not any(re.search(pattern, name) for name in layout.names)]
        if idle:
            raise ValueError(
                f"prior_std: {idle} match no random parameter (the first is {layout.names[0]}). Correct or remove them"
            )
    if config.prior == "he":
        shapes = zip(stds, layout.names, layout.shapes, strict=True)
        stds = [std * he_scale(model, name, shape) for std, name, shape in shapes]
    std = torch.tensor(stds[0], dtype=start.dtype)
    if len(set(stds)) > 1:
        std = torch.tensor(stds, dtype=start.dtype).repeat_interleave(torch.tensor(layout.sizes))
    mean = start.clone() if config.prior_mean == "initial" else torch.zeros((), dtype=start.dtype, device=start.device)
    return PRIORS[config.prior](mean, std.to(start.device))


def prior_stds(config: MethodConfig, layout: Layout, model: nn.Module) -> Any:
    """Return ``prior_scale * prior_std``. For a ``prior_std`` of None: 1, or in a model with LoRA {name: std}."""
    stds: Any = config.prior_std
    if stds is None:
        default = {} if config.prior == "he" else lora_stds(model, layout)
        scale = config.requirements.mode_prior_scale
        named = {name: (1.0 if ".lora_A." in name else scale) * default.get(name, 1.0) for name in layout.names}
        stds = named if default else 1.0
    if isinstance(stds, dict):
        return {name: config.prior_scale * std for name, std in stds.items()}
    return config.prior_scale * stds


def he_scale(model: nn.Module, name: str, shape: tuple[int, ...]) -> float:
    """Return sqrt(2 / fan-in) for a matrix or kernel [out, in, ...] and 1 for a bias or norm.

    The formula is eq. 64 of cold_posteriors, app. L.1. An embedding [vocabulary, width] counts as a matrix with
    ``width`` inputs, which is right if the output head is tied to it. As a table it has one input at a time, and its
    own He scale would be sqrt(2).
    """
    if len(shape) < 2:
        return 1.0
    # the weight of Conv1D (GPT-2) is [in, out]
    transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
    return math.sqrt(2 / (shape[0] if transposed else math.prod(shape[1:])))


def lora_stds(model: nn.Module, layout: Layout) -> dict[str, float]:
    """Return {name: prior std} of LoRA's factors in units of their effect, so that rank and alpha do not matter.

    A has the std of peft's own initialisation, 1 / sqrt(3 fan-in), at which chains start. The std of B is chosen so
    that an entry of Delta W = s B A has a std of ``LORA_EFFECT`` times the RMS of the base weight: the variance of an
    entry is s^2 r var(A) var(B). The RMS of a quantised weight is not known; 1 / sqrt(fan-in) takes its place.
    """
    shapes = layout.named_shapes
    stds: dict[str, float] = {}
    for path, adapter, module in _lora_layers(model):
        names = [f"{path}.lora_{letter}.{adapter}.weight" for letter in "AB"]
        if not all(name in shapes for name in names):
            continue
        rank, fan_in = shapes[names[0]][0], math.prod(shapes[names[0]][1:])
        std = 1 / math.sqrt(3 * fan_in)
        scaling = abs(float(module.scaling[adapter])) or 1.0
        rms = _rms(module.get_base_layer().weight) or 1 / math.sqrt(fan_in)
        stds |= {names[0]: std, names[1]: LORA_EFFECT * rms / (scaling * math.sqrt(rank) * std)}
    return stds


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, adapter, module) of every LoRA adapter with factors A and B."""
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            yield from ((path, adapter, module) for adapter in module.lora_A)


def _rms(weight: Tensor) -> float | None:
    """Return the RMS of a weight; None of a quantised one, which holds codes."""
    return float(weight.detach().float().square().mean().sqrt()) if is_dense(weight) else None


def lora_prior_ratio(model: nn.Module, layout: Layout, prior: IndependentPrior | Gaussian) -> float | None:
    """Return the largest ratio of an implied prior sd of Delta W to the RMS of its base weight; None without LoRA.

    Under a zero-mean prior an entry of Delta W = s B A has the variance s^2 r var(A) var(B).
    """
    stds = layout.unflatten(prior.std.expand(layout.dim))
    ratios = []
    for path, adapter, module in _lora_layers(model):
        names = [f"{path}.lora_{letter}.{adapter}.weight" for letter in "AB"]
        rms = _rms(module.get_base_layer().weight)
        if rms is None or not all(name in stds for name in names):
            continue
        std = float(stds[names[0]].mean() * stds[names[1]].mean()) * len(stds[names[0]]) ** 0.5
        ratios.append(abs(module.scaling[adapter]) * std / rms)
    return max(ratios, default=None)


def _std_of(name: str, stds: float | dict[str, float] | None) -> float:
    if not isinstance(stds, dict):
        return 1.0 if stds is None else float(stds)
    found = [pattern for pattern in stds if re.search(pattern, name)]
    if not found:
        raise ValueError(
            f"prior_std has no expression that matches the random parameter {name}: got {sorted(stds)}. Add one"
        )
    if len(found) > 1:
        raise ValueError(
            f"prior_std has several expressions that match the random parameter {name}: got {found}, expected one. "
            "Narrow them until each parameter matches one (^ and $ bind an expression to the ends of a name)"
        )
    return float(stds[found[0]])
