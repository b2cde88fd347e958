"""The prior of a config, laid out over theta."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout, is_dense
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import GaussianPrior, IndependentPrior, LaplacePrior

PRIORS: dict[str, type[IndependentPrior]] = {"gaussian": GaussianPrior, "he": GaussianPrior, "laplace": LaplacePrior}
"""``MethodConfig.prior`` -> the shape of an element's density."""


def build_prior(
    config: MethodConfig, layout: Layout, start: Tensor, model: nn.Module, inherited: Gaussian | None = None
) -> IndependentPrior | Gaussian:
    """Build what ``prior``, ``prior_mean`` and ``prior_std`` say, or take the posterior of an earlier run.

    "he" multiplies ``prior_std`` by sqrt(2 / fan-in).

    Args:
        config: its ``prior_std`` may map regular expressions on names to stds; each name must match one of them.
        layout: of theta.
        start: [d] the model's own values, the mean if ``prior_mean="initial"``.
        model: whose modules tell the fan-in of a matrix.
        inherited: see ``inheritance.inherit``.
    Raises:
        ValueError: naming the tensor that no expression matches or several do, or an expression that matches no tensor.
    """
    if inherited is not None:
        return inherited.to(start)
    stds = [_std_of(name, config.prior_std) for name in layout.names]
    if isinstance(config.prior_std, dict):
        idle = [pattern for pattern in config.prior_std if not any(re.search(pattern, name) for name in layout.names)]
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


def he_scale(model: nn.Module, name: str, shape: tuple[int, ...]) -> float:
    """sqrt(2 / fan-in) of a matrix or kernel [out, in, ...]; 1 of a bias or norm (cold_posteriors eq. 64, app. L.1).

    An embedding [vocabulary, width] counts as a matrix that reads ``width`` inputs, which it is where the output head
    is tied to it. A lookup reads one input: its own He scale would be sqrt(2).
    """
    if len(shape) < 2:
        return 1.0
    # GPT-2's layers hold [in, out]
    transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
    return math.sqrt(2 / (shape[0] if transposed else math.prod(shape[1:])))


def lora_prior_ratio(model: nn.Module, layout: Layout, prior: IndependentPrior | Gaussian) -> float | None:
    """The largest implied prior sd of an entry of Delta W over the RMS of its base weight; None without LoRA.

    Delta W = s B A has Var = s^2 r var(A) var(B) under a zero-mean prior.
    """
    stds = layout.unflatten(prior.std.expand(layout.dim))
    ratios = []
    for path, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "scaling"):
            continue
        for adapter, factor in module.lora_A.items():
            names = [f"{path}.lora_{letter}.{adapter}.weight" for letter in "AB"]
            if not all(name in stds for name in names):
                continue
            std = float(stds[names[0]].mean() * stds[names[1]].mean()) * factor.out_features**0.5
            weight = module.get_base_layer().weight
            if is_dense(weight):  # the numbers of others are codes
                ratios.append(abs(module.scaling[adapter]) * std / float(weight.detach().float().pow(2).mean().sqrt()))
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
