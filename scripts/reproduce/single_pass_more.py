"""More figures of ``single_pass``: ranks against many members, a distilled student, and scores with an interval.

The functions add them to the record of a subject. They are not a command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes import Posterior, distil
from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.fit.single_pass import fit_variance_factor
from hf_bayes.metrics.functions import risk_coverage
from hf_bayes.models.attaching import MODELS

MANY, OTHERS = 256, 64
"""The number of members of the reference, and of other members beside it."""

RESAMPLES = 1000
"""The number of resamples of the standard error of a difference of areas."""

Batch = dict[str, Tensor]


def in_pieces(sets: Mapping[str, list[Batch]], size: int) -> dict[str, list[Batch]]:
    """Return the batches of each set in batches of at most ``size`` rows."""
    return {
        name: [
            {key: value[start : start + size] for key, value in batch.items()}
            for batch in batches
            for start in range(0, len(next(iter(batch.values()))), size)
        ]
        for name, batches in sets.items()
    }


def against_many(
    subject: Any, posterior: Posterior, student: Posterior, *,
    read: Callable[..., dict[str, Tensor]], cost: Callable[..., float],
) -> dict[str, Any]:  # fmt: skip
    """Return rank correlations of epistemic uncertainty with ``MANY`` members, ratios and costs of ways to predict."""
    kind: Any = MODELS[subject.task]
    is_causal = subject.task == "causal_lm"
    model = kind.from_pretrained(
        posterior, base_model=subject.base(), members=MANY + OTHERS, prediction="members", check_base=False
    )
    theta = model.theta.detach().clone()
    members = {"64 other members": theta[MANY:], "32 other members": theta[MANY : MANY + 32]}
    ways: dict[str, Callable[[], Any]] = {name: functools.partial(shown, model, some) for name, some in members.items()}
    if is_causal:
        ways |= {f"low rank, {n}": functools.partial(model.single_pass, rank=n) for n in (16, 4)}
    else:
        ways["linearised"] = lambda: model.linearise("monte_carlo")
        ways["single pass"] = model.single_pass
    model.linearise(None).show(theta[:MANY])
    pieces = in_pieces(subject.sets, 1 if is_causal else 4)
    reference = read(model, pieces)
    plain = subject.base().eval()
    first = {k: v for k, v in subject.sets["held out"][0].items() if k != "labels"}
    found = {}

    def add(name: str, own_model: Any) -> None:
        own = read(own_model, subject.sets if "members" not in name else pieces)
        ranks = {key: round(rank_correlation(reference[key], own[key]), 3) for key in reference}
        ratio = sum(float(v.sum()) for v in own.values()) / sum(float(v.sum()) for v in reference.values())
        found[name] = ranks | {"ratio": round(ratio, 3), "cost": round(cost(own_model, plain, first), 2)}

    for name, choose in ways.items():
        choose()
        add(name, model)
    model.detach()
    distilled = kind.from_pretrained(student, base_model=subject.base(), prediction="distilled", check_base=False)
    add("student", distilled)
    distilled.detach()
    return found


def shown(model: Any, theta: Tensor) -> None:
    """Let the model predict by these members."""
    model.linearise(None).show(theta)


def student_of(subject: Any, posterior: Posterior) -> Posterior:
    """Return the posterior with a student of 32 members, from rows without labels."""
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in subject.rows] + list(subject.unlabelled)
    return distil(posterior, rows, base_model=subject.base(), members=32, progress=False)


@torch.no_grad()
def per_term(model: Any, batches: Sequence[Batch]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the NLL, the correctness and the confidence of each term."""
    each = [model.evaluate_batch(dict(batch))[0] for batch in batches]
    return {key: torch.cat([x[key].double() for x in each]).numpy() for key in ("nll", "correct", "confidence")}


def cross_fitted(subject: Any, posterior: Posterior, student: Posterior) -> dict[str, dict[str, float]]:
    """Return scores of all held-out rows, where each half has the variance factor that the other half fits."""
    kind: Any = MODELS[subject.task]
    rows = subject.sets["held out"]
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    load = functools.partial(kind.from_pretrained, base_model=subject.base(), check_base=False)
    model = load(posterior, members=32)
    theta = model.theta.detach().clone()
    approximation: Any = posterior.approximation
    means: Tensor = approximation.means
    terms = {}
    for name, choose in {
        "mean network": lambda: model.linearise(None).show(means.to(theta)),
        "32 members": lambda: model.linearise(None).show(theta),
        "single pass": model.single_pass,
    }.items():
        choose()
        terms[name] = per_term(model, rows)
    model.detach()
    parts: list[dict[str, Any]] = []
    for fitted, tested in (halves, halves[::-1]):
        single = [{k: v[i] for k, v in batch.items()} for batch in fitted for i in range(len(batch["labels"]))]
        calibrated = fit_variance_factor(posterior, single, base_model=subject.base(), collate=default_data_collator)
        model = load(calibrated, members=1)
        model.single_pass()
        parts.insert(0, per_term(model, tested))  # the first half is tested last
        model.detach()
    terms["single pass, calibrated"] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    model = load(student, prediction="distilled")
    terms["student"] = per_term(model, rows)
    model.detach()
    return {name: _scores(own, terms["mean network"]) for name, own in terms.items()}


def _area(terms: Mapping[str, np.ndarray[Any, Any]], index: Any = slice(None)) -> float:
    return float(risk_coverage(1 - terms["confidence"][index], 1 - terms["correct"][index]).aurc)


def _scores(own: Mapping[str, np.ndarray[Any, Any]], mean: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
    """Return the scores of a prediction, and the standard error of the difference of its area from the mean network."""
    generator = np.random.default_rng(0)
    count = len(own["nll"])
    chosen = [generator.integers(count, size=count) for _ in range(RESAMPLES)]
    differences = [_area(own, index) - _area(mean, index) for index in chosen]
    return {
        "nll": round(float(own["nll"].mean()), 4),
        "accuracy": round(float(own["correct"].mean()), 4),
        "aurc": round(_area(own), 5),
        "difference": round(_area(own) - _area(mean), 5),
        "error": round(float(np.std(differences)), 5),
    }


def ranks_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of the table of ranks against many members."""
    lines = []
    for name, found in record["subjects"].items():
        lines += [
            [name, way, f"{row['held out']:.2f}", f"{row['other']:.2f}", f"{row['ratio']:.2f}", f"{row['cost']:.1f}"]
            for way, row in found.get("many", {}).items()
        ]
    return ["posterior", "prediction", "held out", "other", "mean EU ratio", "cost"], lines


def scores_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of the table of scores of all held-out terms."""
    lines = []
    for name, found in record["subjects"].items():
        for way, row in found.get("cross-fitted", {}).items():
            gap = "-" if way == "mean network" else f"{row['difference']:+.4f} ± {row['error']:.4f}"
            lines.append([name, way, f"{row['nll']:.3f}", f"{row['accuracy']:.3f}", f"{row['aurc']:.4f}", gap])
    return ["posterior", "prediction", "NLL", "accuracy", "AURC", "AURC less the mean network's"], lines
