"""The Gaussian prior of a config, laid out over theta."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from hf_bayes.config import MethodConfig
from hf_bayes.energy import GaussianPrior
from hf_bayes.subspace import Layout, is_dense


def build_prior(config: MethodConfig, layout: Layout, start: Tensor) -> GaussianPrior:
    """N(mean, std^2) as ``prior_mean`` and ``prior_std`` say.

    Args:
        config: its ``prior_std`` may map regular expressions on names to stds; the first that matches holds.
        layout: of theta.
        start: [d] the model's own values, the mean if ``prior_mean="initial"``.
    Raises:
        ValueError: naming the tensor that no expression matches, or an expression that matches no tensor.
    """
    if isinstance(config.prior_std, dict):
        idle = [pattern for pattern in config.prior_std if not any(re.search(pattern, name) for name in layout.names)]
        if idle:
            raise ValueError(
                f"prior_std: {idle} match no random parameter (the first is {layout.names[0]}). Correct or remove them"
            )
        std = torch.cat(
            [
                torch.full((size,), _std_of(name, config.prior_std), dtype=start.dtype, device=start.device)
                for name, size in zip(layout.names, layout.sizes, strict=True)
            ]
        )
    else:
        value = 1.0 if config.prior_std is None else config.prior_std
        std = torch.tensor(value, dtype=start.dtype, device=start.device)
    mean = start.clone() if config.prior_mean == "initial" else torch.zeros((), dtype=start.dtype, device=start.device)
    return GaussianPrior(mean, std)


def lora_prior_ratio(model: nn.Module, layout: Layout, prior: GaussianPrior) -> float | None:
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


def _std_of(name: str, stds: dict[str, float]) -> float:
    for pattern, std in stds.items():
        if re.search(pattern, name):
            return float(std)
    raise ValueError(f"prior_std has no expression that matches the random parameter {name}: got {sorted(stds)}")
