"""Active learning: are the labels that a rule of acquisition chooses worth more than labels of random rows?

    python -m scripts.reproduce.active_learning

The tasks are those of ``gold_targets``, texts as sentence embeddings of MiniLM. A round samples the last layer of a
classifier by SGHMC at T = 1, measures the accuracy on test rows, and labels more rows of the pool. All rules of a seed
have the same pool, the same test rows and the same first labels.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from hf_bayes import SGHMCConfig, mixture, sample
from hf_bayes.decide.acquisition import RULES, Rule, select_rows
from scripts.reproduce.gold_targets import RECIPES, embedded, labelled
from scripts.reproduce.report import keep, spread, table

NAME = "active_learning"
TASKS = {"Debian, sections": "sections12", "CLINC150, domains": "domains10", "CLINC150, 25 intents": "intents25"}
NUM_POOL, NUM_TEST, NUM_ROUNDS, BATCH, NUM_SEEDS = 400, 600, 8, 10, 5
NUM_CHAINS, DRAWS_PER_CHAIN, NUM_STEPS = 8, 2, 200
SCALE = 10.0
"""The length of an embedding. Embeddings of length 1 would need weights far larger than the prior's."""
COLOURS = {"random": "0.35", "entropy": "#CCBB44", "bald": "#4477AA", "batchbald": "#EE6677"}


def members(features: Tensor, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Return draws [M, C, p] of the last layer, with the prior N(0, 1) on every weight."""
    width = features.shape[1]

    def energy(theta: Tensor, batch: None) -> Tensor:
        log_probs = torch.einsum("bp,mcp->mbc", features, theta.view(-1, num_classes, width)).log_softmax(-1)
        chosen = log_probs.gather(-1, labels.expand(len(theta), -1)[..., None])
        return -chosen.sum((1, 2)) + theta.square().sum(1) / 2

    start = torch.randn(NUM_CHAINS, num_classes * width, generator=torch.Generator().manual_seed(seed))
    found = sample(
        energy, start, SGHMCConfig(), num_steps=NUM_STEPS, learning_rate=0.1, num_data=len(labels),
        burn_in=NUM_STEPS // 2, thin=NUM_STEPS // 2 // DRAWS_PER_CHAIN, seed=seed, progress=False,
    )  # fmt: skip
    return found.draws[:, -DRAWS_PER_CHAIN:].flatten(0, 1).view(-1, num_classes, width)


def curve(features: Tensor, labels: Tensor, by: Rule, seed: int) -> list[float]:
    """Return the accuracy after each round. The first rows are random for every rule."""
    generator, num_classes = torch.Generator().manual_seed(seed), int(labels.max()) + 1
    order = torch.randperm(len(labels), generator=generator).tolist()
    test, rest = order[:NUM_TEST], order[NUM_TEST : NUM_TEST + NUM_POOL]
    chosen, rest, found = rest[:BATCH], rest[BATCH:], []
    for number in range(NUM_ROUNDS):
        theta = members(features[chosen], labels[chosen], num_classes, seed=1000 * seed + number)
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
        features, labels = SCALE * embedded([text for text, _ in rows]), torch.tensor([label for _, label in rows])
        curves[name] = {by: [curve(features, labels, by, seed) for seed in range(NUM_SEEDS)] for by in RULES}
    return {"labels": [BATCH * (number + 1) for number in range(NUM_ROUNDS)], "curves": curves}


def labels_needed(accuracies: Sequence[float], target: float, labels: Sequence[int]) -> float:
    """Return the number of labels at which the best accuracy so far reaches the target, between rounds by a line.

    The target must be reached.
    """
    best = np.maximum.accumulate(accuracies)
    after = int(np.argmax(best >= target))
    if after == 0:
        return float(labels[0])
    share = (target - best[after - 1]) / (best[after] - best[after - 1])
    return float(labels[after - 1] + share * (labels[after] - labels[after - 1]))


def labels_saved(accuracies: Sequence[float], random: Sequence[float], labels: Sequence[int]) -> float:
    """Return the labels that random selection needs beyond the rule's, at the highest accuracy that both reach.

    The number is negative if random selection needs fewer.
    """
    target = min(max(accuracies), max(random))
    return labels_needed(random, target, labels) - labels_needed(accuracies, target, labels)


def verdict(gains: Sequence[float]) -> str:
    """Return which selection is better, by a paired t test at 5 %."""
    if len(gains) < 2 or scipy.stats.ttest_1samp(gains, 0).pvalue > 0.05:
        return "no clear difference"
    return "the rule" if statistics.fmean(gains) > 0 else "random"


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    lines, counts = [], record["labels"]
    middle = len(counts) // 2 - 1
    for task, found in record["curves"].items():
        for by, curves in found.items():
            pairs = list(zip(curves, found["random"], strict=True))
            saved = [labels_saved(own, other, counts) for own, other in pairs]
            gains = [statistics.fmean(own) - statistics.fmean(other) for own, other in pairs]
            same = by == "random"
            lines.append([
                task, by, spread([each[middle] for each in curves]), spread([each[-1] for each in curves]),
                "-" if same else spread(saved, 0), "-" if same else spread(gains), "-" if same else verdict(gains),
            ])  # fmt: skip
    columns = ["task", "rule", f"accuracy, {counts[middle]} labels", f"accuracy, {counts[-1]} labels", "labels saved",
               "mean gain in accuracy", "better"]  # fmt: skip
    return {"curves": table(columns, lines)}


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw the accuracy of each rule against the number of labels, with standard errors over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks, counts = record["curves"], record["labels"]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.4 * len(tasks), 4), layout="constrained", squeeze=False)
    for axis, (task, found) in zip(axes[0], tasks.items(), strict=True):
        for by, curves in found.items():
            values = np.array(curves)
            mean, error = values.mean(0), values.std(0, ddof=1 if len(values) > 1 else 0) / len(values) ** 0.5
            axis.fill_between(counts, mean - error, mean + error, color=COLOURS[by], alpha=0.15, lw=0)
            axis.plot(counts, mean, "o--" if by == "random" else "o-", ms=3, color=COLOURS[by], label=by)
        axis.set(title=task, xlabel="labels")
        axis.grid(color="0.92")
    axes[0, 0].set_ylabel("accuracy on test rows")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False
    )
    figure.savefig(directory / f"{NAME}.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    keep(NAME, run)
