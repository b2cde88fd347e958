"""Active learning: are the labels that a rule of acquisition chooses worth more than labels of random rows?

    python -m scripts.reproduce.active_learning

The tasks are those of ``gold_targets``, texts as sentence embeddings of MiniLM. A round trains the last layer of a
classifier (an ensemble of MAP estimates), measures accuracy on test rows, and labels more rows of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_bayes import mixture
from hf_bayes.decide.acquisition import RULES, Rule, select_rows
from scripts.reproduce.gold_targets import RECIPES, embedded, labelled
from scripts.reproduce.report import keep, spread, table

NAME = "active_learning"
TASKS = {"Debian, sections": "sections12", "CLINC150, domains": "domains10", "CLINC150, 25 intents": "intents25"}
NUM_POOL, NUM_TEST, NUM_ROUNDS, BATCH, NUM_SEEDS, NUM_MEMBERS = 400, 600, 8, 10, 5, 8


def ensemble(features: Tensor, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Return [M, C, p] last layers: MAP estimates from different starts, each on its own bootstrap of the rows."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(NUM_MEMBERS, num_classes, features.shape[1], generator=generator).requires_grad_()
    rows = torch.randint(len(labels), (NUM_MEMBERS, len(labels)), generator=generator)
    optimizer = torch.optim.AdamW([theta], lr=0.1, weight_decay=0.0)
    for _ in range(50):
        logits = torch.einsum("mbp,mcp->mbc", features[rows], theta)
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")
        optimizer.zero_grad()
        (nll + theta.square().sum() / 2).backward()
        optimizer.step()
    return theta.detach()


def curve(features: Tensor, labels: Tensor, by: Rule, seed: int) -> list[float]:
    """Return the accuracy after each round. The first rows are random for every rule."""
    generator, num_classes = torch.Generator().manual_seed(seed), int(labels.max()) + 1
    order = torch.randperm(len(labels), generator=generator).tolist()
    test, rest = order[:NUM_TEST], order[NUM_TEST : NUM_TEST + NUM_POOL]
    chosen, rest, found = rest[:BATCH], rest[BATCH:], []
    for number in range(NUM_ROUNDS):
        theta = ensemble(features[chosen], labels[chosen], num_classes, seed=1000 * seed + number)
        predicted = mixture(torch.einsum("bp,mcp->mbc", features[test], theta)).argmax(-1)
        found.append((predicted == labels[test]).double().mean().item())
        logits = torch.einsum("bp,mcp->mbc", features[rest], theta)
        places = set(select_rows(logits, BATCH, by=by, generator=generator))
        chosen = chosen + [rest[place] for place in sorted(places)]
        rest = [row for place, row in enumerate(rest) if place not in places]
    return found


def run() -> dict[str, Any]:
    """Return the accuracies of all tasks, rules and seeds."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for name, recipe in TASKS.items():
        rows = labelled(RECIPES[recipe])[: NUM_POOL + NUM_TEST]
        features, labels = 10 * embedded([text for text, _ in rows]), torch.tensor([label for _, label in rows])
        curves[name] = {by: [curve(features, labels, by, seed) for seed in range(NUM_SEEDS)] for by in RULES}
    return {"labels": [BATCH * (number + 1) for number in range(NUM_ROUNDS)], "curves": curves}


def labels_needed(accuracies: list[float], target: float, labels: list[int]) -> int | None:
    """Return the number of labels at which the target is reached first, or None."""
    return next((count for count, value in zip(labels, accuracies, strict=True) if value >= target), None)


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    lines, counts = [], record["labels"]
    for task, found in record["curves"].items():
        targets = [each[-1] for each in found["random"]]
        for by, curves in found.items():
            needed = [labels_needed(each, target, counts) for each, target in zip(curves, targets, strict=True)]
            saved = [float(counts[-1] - count) for count in needed if count is not None]
            half = [each[len(counts) // 2 - 1] for each in curves]
            lines.append([
                task, by, spread(half), spread([each[-1] for each in curves]),
                spread(saved, 0) if saved else "-", f"{len(saved)} of {len(curves)}",
            ])  # fmt: skip
    columns = ["task", "rule", f"accuracy, {counts[len(counts) // 2 - 1]} labels", f"accuracy, {counts[-1]} labels",
               "labels saved", "seeds that reach random's accuracy"]  # fmt: skip
    return {"curves": table(columns, lines)}


if __name__ == "__main__":
    keep(NAME, run)
