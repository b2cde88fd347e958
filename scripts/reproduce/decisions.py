"""Promises of error rates and of coverage, kept over many splits of real text; and which score to abstain by.

    python -m scripts.reproduce.decisions

The texts are CLINC150 (``gold_targets.clinc``). The model is the last layer of a classifier on sentence embeddings of
MiniLM, and its posterior is sampled by SGHMC. The rows that it was not trained on are split in two again and again: the
first part makes a rule, the second part shows what the rule does. The scores of the second table order the same rows,
and with them the out-of-scope queries of the data set, for which every answer is an error.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_bayes import SGHMCConfig, decompose, mixture, sample
from hf_bayes.decide.prediction_sets import SCORES, fit_prediction_sets
from hf_bayes.decide.threshold import fit_threshold
from hf_bayes.metrics import risk_coverage
from hf_bayes.metrics.calibration import NUM_GROUPS, GroupSums, fit_calibration
from hf_bayes.uncertainty.mixture_temperature import nll_at_temperatures
from scripts.reproduce.gold_targets import clinc, clinc_folder, embedded
from scripts.reproduce.report import keep, spread, table

NAME = "decisions"
NUM_TRAIN, NUM_HELDOUT, NUM_MEMBERS, NUM_SPLITS = 2000, 1500, 8, 100
SCALE = 10.0
"""The length of an embedding. Embeddings of length 1 would need weights far larger than the prior's."""
COVERAGES, ERROR_RATES = (0.8, 0.9, 0.95), (0.05, 0.1, 0.2)
MEASURES = ("one_minus_confidence", "total", "aleatoric", "epistemic")
FAILURE_RATE = 0.1
REJECTED = (0.0, 0.1, 0.2, 0.3, 0.5)


def rows() -> dict[str, tuple[Tensor, Tensor]]:
    """Return the embeddings and classes of "train", "other" and "out of scope" rows (classes of -1)."""
    texts, domains = clinc()
    names = sorted({intent for intents in domains.values() for intent in intents})
    texts = random.Random(0).sample(texts, NUM_TRAIN + 2 * NUM_HELDOUT)
    unknown = [text for text, _ in json.loads((clinc_folder() / "data_full.json").read_text())["oos_test"]]
    found = SCALE * embedded([text for text, _ in texts] + unknown)
    labels = torch.tensor([names.index(name) for _, name in texts] + [-1] * len(unknown))
    sizes = (NUM_TRAIN, 2 * NUM_HELDOUT, len(unknown))
    parts = zip(("train", "other", "out of scope"), found.split(sizes), labels.split(sizes), strict=True)
    return {name: (features, classes) for name, features, classes in parts}


def members(features: Tensor, labels: Tensor, *, num_steps: int = 1000, seed: int = 0) -> Tensor:
    """Return draws [M, C, p + 1] of the last layer, one of each chain."""
    num_classes, width = int(labels.max()) + 1, features.shape[1] + 1
    features, generator = with_bias(features), torch.Generator().manual_seed(seed)

    def energy(theta: Tensor, batch: Tensor) -> Tensor:
        logits = torch.einsum("bp,mcp->mbc", features[batch], theta.view(-1, num_classes, width))
        chosen = logits.log_softmax(-1).gather(-1, labels[batch].expand(len(theta), -1)[..., None])[..., 0]
        return -chosen.sum(1) * len(labels) / len(batch) + theta.square().sum(1) / 2

    def batches() -> Any:
        while True:
            yield torch.randperm(len(labels), generator=generator)[:64]

    start = 0.1 * torch.randn(NUM_MEMBERS, num_classes * width, generator=generator)
    found = sample(
        energy, start, SGHMCConfig(), num_steps=num_steps, learning_rate=0.1, num_data=len(labels), batches=batches(),
        burn_in=num_steps - 1, seed=seed, progress=False,
    )  # fmt: skip
    return found.draws[:, -1].view(-1, num_classes, width)


def with_bias(features: Tensor) -> Tensor:
    """Return the features with a column of ones."""
    return torch.cat([features, torch.ones(len(features), 1)], 1)


def point_estimate(features: Tensor, labels: Tensor) -> Tensor:
    """Return the last layer [C, p + 1] at the maximum of the posterior that ``members`` samples from."""
    features, num_classes = with_bias(features), int(labels.max()) + 1
    theta = torch.zeros(num_classes, features.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=0.05, weight_decay=0.0)
    for _ in range(300):
        nll = torch.nn.functional.cross_entropy(features @ theta.T, labels, reduction="sum")
        optimizer.zero_grad()
        (nll + theta.square().sum() / 2).backward()
        optimizer.step()
    return theta.detach()


def promises(log_probs: Tensor, labels: Tensor, uncertainty: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what rules from one half of the rows do on the other half, over random halves."""
    wrong = (log_probs.argmax(-1) != labels).double().numpy()
    sets: dict[str, list[Any]] = {f"{score} {coverage}": [] for score in SCORES for coverage in COVERAGES}
    rules: dict[str, list[Any]] = {f"{name} {rate}": [] for name in MEASURES for rate in ERROR_RATES}
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_SPLITS):
        held, new = torch.randperm(len(labels), generator=generator).chunk(2)
        for score in SCORES:
            for coverage in COVERAGES:
                rule = fit_prediction_sets(
                    log_probs[held], labels[held], coverage=coverage, score=score, generator=generator
                )
                found = rule(log_probs[new], generator)
                covered = found.gather(1, labels[new, None]).double().mean().item()
                sets[f"{score} {coverage}"].append([covered, found.sum(1).double().mean().item()])
        for name in MEASURES:
            for rate in ERROR_RATES:
                rules[f"{name} {rate}"].append(_kept(uncertainty[name], wrong, held.numpy(), new.numpy(), name, rate))
    return {
        "sets": {name: dict(zip(("coverage", "size"), _columns(found), strict=True)) for name, found in sets.items()},
        "rules": {
            name: dict(zip(("answered", "error_rate"), _columns([pair for pair in found if pair]), strict=True))
            for name, found in rules.items()
        },
    }


def _columns(pairs: list[Any]) -> list[list[float]]:
    """Return the first and the second numbers of pairs, to six digits."""
    return [[round(pair[place], 6) for pair in pairs] for place in (0, 1)]


def _kept(values: Any, wrong: Any, held: Any, new: Any, name: str, rate: float) -> list[float] | None:
    """Return the share of new rows that a rule answers and their error rate, or None if no rule keeps its promise."""
    try:
        rule = fit_threshold(values[held], wrong[held], error_rate=rate, failure_rate=FAILURE_RATE, measure=name)
    except ValueError:
        return None
    answered = values[new] <= rule.threshold
    return [float(answered.mean()), float(wrong[new][answered].mean())]


def run() -> dict[str, Any]:
    """Return all numbers of the page."""
    parts = rows()
    draws = members(*parts["train"])
    logits = {name: torch.einsum("bp,mcp->mbc", with_bias(part[0]), draws) for name, part in parts.items()}
    best = point_estimate(*parts["train"])
    point = {name: (with_bias(part[0]) @ best.T).log_softmax(-1) for name, part in parts.items()}
    log_probs, labels = mixture(logits["other"]), parts["other"][1]
    known = {"one_minus_confidence": 1 - log_probs.exp().amax(-1), **decompose(logits["other"])._asdict()}
    found = promises(log_probs, labels, {name: value.double().numpy() for name, value in known.items()})
    return {
        "accuracy": (log_probs.argmax(-1) == labels).double().mean().item(),
        "point_accuracy": (point["other"].argmax(-1) == labels).double().mean().item(),
        "temperature": temperature_of(mixture(logits["other"])[:NUM_HELDOUT], labels[:NUM_HELDOUT]),
        **found,
        "scores": {
            "known": compared(("other",), logits, point, parts),
            "with out of scope": compared(("other", "out of scope"), logits, point, parts),
        },
    }


def temperature_of(log_probs: Tensor, labels: Tensor) -> float:
    """Return the temperature that fits held-out rows best."""
    sums = GroupSums.empty()
    sums.add(nll_at_temperatures(log_probs, labels), torch.arange(len(labels)) % NUM_GROUPS)
    return float(fit_calibration(sums, num_members=NUM_MEMBERS, prediction="members").temperature)


def compared(
    shown: tuple[str, ...], logits: Mapping[str, Tensor], point: Mapping[str, Tensor], parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return AURC and the accuracy after rejection of each score, on rows after the held-out ones.

    Args:
        shown: names of parts.
        logits: name -> [M, N, C] of the members.
        point: name -> [N, C] log-probabilities of the point estimate.
        parts: name -> (features, classes).
    """

    def tested(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name][..., NUM_HELDOUT if name == "other" else 0 :, :] for name in shown], -2)

    held, classes = parts["other"][1][:NUM_HELDOUT], {name: part[1][:, None] for name, part in parts.items()}
    labels = tested(classes)[:, 0]
    temperatures = (
        temperature_of(point["other"][:NUM_HELDOUT], held),
        temperature_of(mixture(logits["other"][:, :NUM_HELDOUT]), held),
    )
    results = {}
    for name, (values, log_probs) in scores_of(tested(logits), tested(point), temperatures).items():
        wrong = (log_probs.argmax(-1) != labels).double().numpy()
        curve = risk_coverage(values.double().numpy(), wrong)
        places = [round((1 - share) * len(wrong)) - 1 for share in REJECTED]
        results[name] = {"aurc": curve.aurc, "accuracy": [1 - float(curve.risk[place]) for place in places]}
    return results


def scores_of(logits: Tensor, point: Tensor, temperatures: tuple[float, float]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> (uncertainty [N], the log-probabilities [N, C] that answer)."""
    mixed, parts = mixture(logits), decompose(logits)

    def unsure(log_probs: Tensor, temperature: float = 1.0) -> Tensor:
        return 1 - (log_probs.double() / temperature).softmax(-1).amax(-1)

    return {
        "point estimate: 1 - confidence": (unsure(point), point),
        "point estimate: temperature-scaled 1 - confidence": (unsure(point, temperatures[0]), point),
        "point estimate: entropy (the order of its perplexity)": (-(point.exp() * point).sum(-1), point),
        "mixture: 1 - confidence": (unsure(mixed), mixed),
        "mixture: temperature-scaled 1 - confidence": (unsure(mixed, temperatures[1]), mixed),
        "mixture: total (the order of its perplexity)": (parts.total, mixed),
        "mixture: aleatoric": (parts.aleatoric, mixed),
        "mixture: epistemic": (parts.epistemic, mixed),
    }


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    return {"sets": _sets(record), "rules": _rules(record), "scores": _scores(record)}


def _sets(record: Mapping[str, Any]) -> str:
    lines = []
    for name, found in record["sets"].items():
        score, promised = name.split()
        lines.append([score, promised, spread(found["coverage"]), spread(found["size"], 2)])
    return table(["score", "promised coverage", "coverage", "classes in a set"], lines)


def _rules(record: Mapping[str, Any]) -> str:
    lines = []
    for name, found in record["rules"].items():
        measure, rate = name.split()
        errors = found["error_rate"]
        broken = sum(error > float(rate) for error in errors) / NUM_SPLITS
        numbers = [spread(errors), spread(found["answered"])] if errors else ["-", "-"]
        lines.append([measure, rate, *numbers, f"{broken:.0%}", str(NUM_SPLITS - len(errors))])
    columns = ["measure", "promised error rate", "error rate", "answered", "splits above the promise", "refused"]
    return table(columns, lines)


def _scores(record: Mapping[str, Any]) -> str:
    lines = []
    for rows_of, found in record["scores"].items():
        for name, numbers in found.items():
            lines.append([rows_of, name, f"{numbers['aurc']:.4f}", *(f"{value:.3f}" for value in numbers["accuracy"])])
    columns = ["rows", "score", "AURC", *(f"accuracy, {share:.0%} rejected" for share in REJECTED)]
    return table(columns, lines)


if __name__ == "__main__":
    keep(NAME, run)
