"""Linearised language models of few words, and their logits by brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes import BayesianModelForCausalLM, attach
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.distributions.approximations import Gaussian
from tests import tiny_models as models
from tests.models.linear_cases import random_covariance
from tests.tiny_models import tiny_gpt2, tiny_llama, with_lora


class Posterior:
    """The part of a posterior that ``linearise`` reads."""

    def __init__(self, approximation: Any) -> None:
        self.approximation = approximation
        self.config = SimpleNamespace(calibration={})


WORDS = 24
"""A Jacobian takes a backward pass for each word at each position."""


def gpt2() -> nn.Module:
    return tiny_gpt2(dtype=torch.float64, n_embd=8, vocab_size=WORDS)


def lora_gpt2() -> nn.Module:
    return with_lora(gpt2())


def few_words(rows: int = 3, padding: str | None = "left", length: int = 5, words: int = 12) -> dict[str, Tensor]:
    inputs = models.batch(rows=rows, length=length, padding=padding)
    return {"input_ids": inputs["input_ids"] % words, "attention_mask": inputs["attention_mask"]}


def draws_of(model: nn.Module, layout: Layout, count: int = 3, size: float = 0.3) -> tuple[Tensor, Tensor]:
    """[2, d] means of a mixture, and [count, d] draws far enough away for a curve to show."""
    generator = torch.Generator().manual_seed(1)
    start = initial(model, layout)
    # a constant would not do: no norm sees one that is added to all embeddings
    away, *noise = torch.randn(1 + count, layout.dim, generator=generator, dtype=start.dtype)
    means = torch.stack([start, start + 0.2 * away])
    return means, means[torch.arange(count) % 2] + size * torch.stack(noise)


def attached(model: nn.Module, subspace: str, means: Tensor, theta: Tensor) -> Any:
    bayesian = attach(model, theta, subspace=subspace)
    bayesian.posterior = Posterior(Gaussian.diagonal(means, torch.ones_like(means)))  # type: ignore[assignment]
    return bayesian


def linear_logits(bayesian: BayesianModelForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    """[M, B, T, V] that a linearised model hands to the mixture."""
    rows, length = inputs["input_ids"].shape
    chunks = bayesian.predictions({**inputs, "use_cache": False}, torch.arange(rows * length))
    found = [prediction.members[1] for _, prediction in chunks if prediction.members is not None]
    return torch.cat(found, 1).unflatten(1, (rows, length))


def brute_force(model: nn.Module, layout: Layout, inputs: dict[str, Tensor], mean: Tensor, theta: Tensor) -> Tensor:
    """[B, T, V]: f(x, mean) + J (theta - mean), the Jacobian of one row at a time."""
    rows = []
    for row in range(len(inputs["input_ids"])):
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        mask = own["attention_mask"]
        own["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)

        def logits(flat: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            values: Any = layout.unflatten(flat)
            return torch.func.functional_call(model, values, (), {**own, "use_cache": False}).logits[0]

        jacobian = torch.autograd.functional.jacobian(logits, mean)
        rows.append(logits(mean).detach() + jacobian @ (theta - mean))
    return torch.stack(rows)


SMALL = {"hidden_size": 4, "intermediate_size": 6, "vocab_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def head_model(kind: str = "diagonal", num_draws: int = 3, std: float = 1.0, **sizes: Any) -> Any:
    """A Llama of 12 words whose head alone is random, and its Gaussian of any structure."""
    model = tiny_llama(dtype=torch.float64, **{**SMALL, **sizes})
    layout = select(model, r"lm_head")
    start = std * initial(model, layout)
    covariances = tuple(random_covariance(kind, layout, seed) for seed in (0, 1))
    gaussian = Gaussian(torch.stack([start, start + 0.1]), covariances)
    theta = gaussian.sample(num_draws, torch.Generator().manual_seed(0))
    bayesian = attach(model, theta, subspace="lm_head")
    bayesian.posterior = Posterior(gaussian)  # type: ignore[assignment]
    return bayesian
