"""Small posteriors with and without a student, each made once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_bayes import Posterior, attach, distil
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.models.to_posterior import to_posterior
from tests.runs import label_rows, token_rows
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

ROWS = label_rows(400, seed=3)
TEXTS = token_rows(60, seed=3)


def base(task: str) -> Any:
    return tiny_bert() if task == "classes" else tiny_llama()


@functools.cache
def ensemble(task: str, num_members: int = 4, seed: int = 0) -> Posterior:
    """Members around one classifier, or around one LoRA of a language model."""
    model = base(task) if task == "classes" else with_lora(base(task))
    subspace = "last_layer" if task == "classes" else "trainable"
    with attach(model, subspace=subspace) as bayesian:
        start = bayesian.theta.detach()
        generator = torch.Generator().manual_seed(seed)
        theta = start + 0.2 * torch.randn(num_members, start.shape[1], generator=generator)
        draws = Draws(theta, torch.arange(num_members))
        return to_posterior(
            bayesian, draws, EnsembleConfig(num_chains=num_members, prior_std=1.0), subspace=subspace, num_data=100.0,
            data_unit="token", tokenizer=None, seed=0, diagnostics={},
        )  # fmt: skip


@functools.cache
def distilled(task: str) -> Posterior:
    """The same posterior with a student."""
    rows = ROWS if task == "classes" else TEXTS
    return distil(ensemble(task), rows, base_model=base(task), batch_size=50, progress=False)


def inputs_of(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return rows of one length as a batch without labels."""
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
