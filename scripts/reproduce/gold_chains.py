"""Exact references of the targets: the predictive distribution of a posterior, by Hamiltonian Monte Carlo.

    python -m scripts.reproduce.gold_chains            # makes the golds that are missing in docs/results/golds
    python -m scripts.reproduce.gold_chains sections12 # makes these golds again

A *gold* is made by Hamiltonian Monte Carlo of ``hf_bayes.sample`` in coordinates that a Kronecker-factored Laplace
approximation whitens, which does not change the posterior. Its draws are not kept. A file holds the mixture of their
predictions and its epistemic uncertainty for each row to predict, with R-hat and effective sample size (ESS) of all
logits, the sampling error of a draw, and a digest of the features.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from hf_bayes import HMCConfig
from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, rhat
from hf_bayes.uncertainty.decomposition import decompose
from scripts.reproduce.gold_targets import RECIPES, Target, target
from scripts.reproduce.report import RESULTS

GOLDS = RESULTS / "golds"
MAX_RHAT = 1.01


class Gold(NamedTuple):
    """The mixture's probabilities [B, C], EU [B] in nats, and the file's words about its chains."""

    probs: Tensor
    epistemic: Tensor
    about: dict[str, str]


class Whitened(NamedTuple):
    """A posterior in coordinates v [M, (p + 1) C], in which its curvature at the mode is about 1.

    weights [p + 1, C] = left (mode + scale * v) right'. ``rotated`` is x left, of rows x with a last feature of one.
    """

    rotated: Tensor
    one_hot: Tensor
    left: Tensor
    right: Tensor
    mode: Tensor
    scale: Tensor

    def logits(self, rotated: Tensor, v: Tensor) -> Tensor:
        """Return [B, M, C] of rows x left."""
        weights = (self.mode + self.scale * v.unflatten(1, self.scale.shape)) @ self.right.T
        return (rotated @ weights.transpose(0, 1).flatten(1)).unflatten(1, (len(v), -1))  # one product for all chains

    def energy(self, v: Tensor, _: Any = None) -> Tensor:
        """Return U [M] of v, for all data."""
        logits = self.logits(self.rotated, v)
        terms = logits.logsumexp(-1) - (logits * self.one_hot[:, None]).sum(-1)
        weights = self.mode + self.scale * v.unflatten(1, self.scale.shape)
        return terms.double().sum(0) + weights.double().square().sum((1, 2)) / 2


def with_ones(features: Tensor) -> Tensor:
    """Return features with a last column of ones."""
    return torch.cat([features, torch.ones(len(features), 1)], 1)


def whitened(rows: Target) -> Whitened:
    """Return the posterior in coordinates of its Kronecker-factored Laplace approximation at the MAP estimate."""
    x = with_ones(rows.features).double()
    one_hot = torch.nn.functional.one_hot(rows.labels, rows.num_classes).double()
    weights = torch.zeros(x.shape[1], rows.num_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=1000, line_search_fn="strong_wolfe")

    def energy() -> Tensor:
        optimizer.zero_grad()
        logits = x @ weights
        value = (logits.logsumexp(1) - (logits * one_hot).sum(1)).sum() + weights.square().sum() / 2
        value.backward()
        return value

    optimizer.step(energy)
    found, n = weights.detach(), len(x)
    probs = (x @ found).softmax(1)
    inputs, left = torch.linalg.eigh(x.T @ x / n)
    outputs, right = torch.linalg.eigh(probs.mean(0).diag() - probs.T @ probs / n)
    scale = (n * inputs.clamp_min(0)[:, None] * outputs.clamp_min(0) + 1).rsqrt()
    return Whitened(*(part.float() for part in (x @ left, one_hot, left, right, left.T @ found @ right, scale)))


def make_gold(name: str, *, num_chains: int = 4, burn_in: int = 100) -> Gold:
    """Return the gold of a target.

    Raises:
        ValueError: if R-hat of some logit exceeds ``MAX_RHAT``.
    """
    rows, recipe = target(name), RECIPES[name]
    posterior = whitened(rows)
    # over-dispersed: the prior's share aside, the posterior has standard deviation 1
    start = 1.5 * torch.randn(num_chains, posterior.scale.numel(), generator=generator("gold", name))
    # curvatures differ between classes, so some directions have shorter periods; with trajectories of one length these
    # would come near half a period, where a chain keeps its distance to the mode
    method = HMCConfig(
        num_chains=num_chains, step_size=0.1, num_leapfrog=recipe.num_leapfrog, adapt_mass=False, jitter=0.5
    )
    found = sample(
        posterior.energy, start, method, num_steps=burn_in + recipe.num_draws, learning_rate=0.1, burn_in=burn_in
    )
    test = with_ones(rows.test) @ posterior.left
    logits = torch.stack([posterior.logits(test, draws).transpose(0, 1) for draws in found.draws.unbind(1)], 1)
    about = {"parameters": posterior.scale.numel(), "chains": num_chains, "burn_in": burn_in}
    about |= {"draws": recipe.num_draws, "leapfrog": recipe.num_leapfrog, "rows": rows.digest()}
    about |= {"acceptance": f"{float(found.info['acceptance'][burn_in:].mean()):.3f}"}
    return gold_of_logits(name, logits, about)


def gold_of_logits(name: str, logits: Tensor, about: Mapping[str, object]) -> Gold:
    """Return the gold of draws with logits [M, S, B, C], and what it says about its chains.

    Raises:
        ValueError: if R-hat of some logit exceeds ``MAX_RHAT``.
    """
    probs, pooled = logits.double().softmax(-1), logits.flatten(0, 1).double()
    centred = (logits - logits.mean(-1, keepdim=True)).flatten(2)
    worst, sizes = float(rhat(centred).max()), ess(centred)
    found = {"rhat": f"{worst:.4f}", "ess_min": f"{float(sizes.min()):.0f}"}
    found |= {"ess_median": f"{float(sizes.median()):.0f}"} | {"tv_draw": f"{error_of_a_draw(probs.flatten(0, 1)):.3f}"}
    if not worst <= MAX_RHAT:
        raise ValueError(f"{name}: R-hat {worst:.3f} where {MAX_RHAT} is allowed: take more draws ({found})")
    words = {name: str(value) for name, value in about.items()} | found
    return Gold(probs.mean((0, 1)).float(), decompose(pooled).epistemic.float(), words)


def error_of_a_draw(probs: Tensor) -> float:
    """Return c of c / sqrt(K), the total variation to expect between K independent draws and the posterior.

    A mean over K draws is nearly normal, so the expectation of an absolute error is sqrt(2 / pi) standard deviations.

    Args:
        probs: [K, B, C] of draws of the posterior.
    """
    return (2 / math.pi) ** 0.5 * float(probs.std(0).sum(1).mean()) / 2


def variation(one: Tensor, other: Tensor) -> float:
    """Return the total variation between probabilities [B, C], as a mean over rows."""
    return float((one - other).abs().sum(1).mean() / 2)


def save(name: str, gold: Gold) -> None:
    """Write the file of a gold."""
    GOLDS.mkdir(exist_ok=True)
    tensors = {"probs": gold.probs.contiguous(), "epistemic": gold.epistemic.contiguous()}
    save_file(tensors, GOLDS / f"{name}.safetensors", metadata=gold.about)


def load(name: str) -> Gold:
    """Return the gold of a target from its file."""
    with safe_open(GOLDS / f"{name}.safetensors", "pt") as file:
        return Gold(file.get_tensor("probs"), file.get_tensor("epistemic"), file.metadata())


def main() -> None:
    """Make golds."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    missing = [name for name in RECIPES if not (GOLDS / f"{name}.safetensors").exists()]
    for name in sys.argv[1:] or missing:
        gold = make_gold(name)
        save(name, gold)
        print(name, gold.about)


if __name__ == "__main__":
    main()
