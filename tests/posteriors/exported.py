"""Posteriors of tiny language models, to export and to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_bayes.core.layout import select
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.posteriors.posterior import Posterior
from tests.members.reference import scattered
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora

Make = Callable[[nn.Module], nn.Module]
BASES: dict[str, Callable[..., Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2}
KINDS: dict[str, tuple[str, Make, str]] = {
    "lora": ("llama", with_lora, "trainable"),
    "lora-of-several-ranks": (
        "llama",
        lambda model: with_lora(model, use_rslora=True, r=3, rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 7}),
        "trainable",
    ),
    "lora-and-whole-modules": (
        "llama",
        lambda model: with_lora(model, modules_to_save=["lm_head", "norm"]),
        "trainable",
    ),
    "lora-of-gpt2": ("gpt2", with_lora, "trainable"),
    "lora-and-whole-head-of-gpt2": ("gpt2", lambda model: with_lora(model, modules_to_save=["lm_head"]), "trainable"),
    "lora-of-the-head": ("llama", lambda model: with_lora(model, target_modules=["lm_head"]), "trainable"),
    "lora-of-a-tied-head": ("gpt2", lambda model: with_lora(model, target_modules=["lm_head"]), "trainable"),
    "last-layer": ("llama", lambda model: model, "last_layer"),
    "last-block-of-gpt2": ("gpt2", lambda model: model, "last_block"),
    "tied-last-layer": ("gpt2", lambda model: model, "last_layer"),
    "all-weights": ("llama", lambda model: model, "all"),
}
"""name -> the base, what is put on it, and the random parameters."""


def posterior_of(kind: str, folder: Path, *, members: int = 3, gaussian: bool = False, **changes: Any) -> Posterior:
    """Save the base model and its tokenizer in ``folder``, and return a posterior of scattered members."""
    base, adapt, subspace = KINDS[kind]
    BASES[base]().save_pretrained(folder)
    tiny_tokenizer(padding_side="left").save_pretrained(folder)
    model = adapt(type(BASES[base]()).from_pretrained(folder))
    theta = scattered(model, select(model, subspace), members)
    bayesian = attach(model, theta, subspace=subspace)
    approximation: Draws | Gaussian = Draws(theta, torch.arange(members))
    if gaussian:
        approximation = Gaussian.diagonal(theta[:1], theta[1:2].abs() / 10 + 0.01)
    posterior = to_posterior(
        bayesian, approximation, SGHMCConfig(), subspace=subspace, num_data=10.0, data_unit="token",
        tokenizer=tiny_tokenizer(padding_side="left"), seed=3, diagnostics={},
    )  # fmt: skip
    bayesian.detach()
    return posterior
