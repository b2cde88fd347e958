"""The figures of ``single_pass`` on the quality of predictions, with the standard error of a difference of areas."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes import Posterior, distil
from hf_bayes.fit.single_pass import fit_variance_factor
from hf_bayes.metrics.functions import risk_coverage
from hf_bayes.models.attaching import MODELS
from scripts.reproduce.report import table
from scripts.reproduce.single_pass_subjects import Batch, Subject, unbatched

WAYS = ("mean network", "32 members", "single pass", "single pass, calibrated", "student")
ANOTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence_classification": ("single pass, low rank, 16", {"structure": "low_rank", "rank": 16}),
    "causal_lm": ("single pass, diagonal", {"structure": "diagonal"}),
}
"""Task -> another structure than the default, and its settings."""

RIVALS = ("mean network", "single pass")
"""The predictions whose area is subtracted."""

RESAMPLES = 1000
"""The number of resamples of the standard error of a difference of areas."""


def student_of(subject: Subject, posterior: Posterior) -> Posterior:
    """Return the posterior with a student of 32 members, from rows without labels."""
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in subject.rows] + list(subject.unlabelled)
    return distil(posterior, rows, base_model=subject.base(), members=32, progress=False)


@torch.no_grad()
def per_term(model: Any, batches: Sequence[Batch]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the NLL, the correctness and the confidence of each term."""
    each = [model.evaluate_batch(dict(batch))[0] for batch in batches]
    return {key: torch.cat([x[key].double() for x in each]).numpy() for key in ("nll", "correct", "confidence")}


def of_log_probs(log_probs: Tensor, batches: Sequence[Batch], *, is_causal: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Return what ``per_term`` returns, of log-probabilities [terms, C] of the batches without padding."""
    labels = torch.cat([batch["labels"] for batch in batches])
    if is_causal:  # each token is predicted before it
        log_probs = log_probs.unflatten(0, labels.shape)[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
    wide = log_probs.double().log_softmax(-1)
    best = wide.max(-1)
    found = {
        "nll": -wide.gather(-1, labels[:, None])[:, 0],
        "correct": (best.indices == labels).double(),
        "confidence": best.values.exp(),
    }
    return {key: value.numpy() for key, value in found.items()}


def cross_fitted(
    subject: Subject, posterior: Posterior, student: Posterior, members: Tensor
) -> dict[str, dict[str, float]]:
    """Return scores of all held-out rows, where each half has the variance factor that the other half fits.

    Args:
        members: [terms, C] log-probabilities of the mixture of 32 members.
    """
    kind: Any = MODELS[subject.task]
    rows = subject.sets["held out"]
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    load = functools.partial(kind.from_pretrained, base_model=subject.base(), check_base=False)
    model = load(posterior, members=1)
    approximation: Any = posterior.approximation
    means: Tensor = approximation.means
    model.linearise(None).show(means.to(model.theta))
    terms = {"mean network": per_term(model, rows)}
    terms["32 members"] = of_log_probs(members, rows, is_causal=subject.task == "causal_lm")
    model.single_pass()
    terms["single pass"] = per_term(model, rows)
    label, options = ANOTHER[subject.task]
    model.single_pass(**options)
    terms[label] = per_term(model, rows)
    model.detach()
    parts: list[dict[str, Any]] = []
    for fitted, tested in (halves, halves[::-1]):
        single = unbatched(fitted)
        calibrated = fit_variance_factor(posterior, single, base_model=subject.base(), collate=default_data_collator)
        model = load(calibrated, members=1)
        model.single_pass()
        parts.insert(0, per_term(model, tested))  # the first half is tested last
        model.detach()
    terms["single pass, calibrated"] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    model = load(student, prediction="distilled")
    terms["student"] = per_term(model, rows)
    model.detach()
    rivals = [terms["mean network"], terms["single pass"]]
    return {name: _scores(own, rivals) for name, own in terms.items()}


def _area(terms: Mapping[str, np.ndarray[Any, Any]], index: Any = slice(None)) -> float:
    return float(risk_coverage(1 - terms["confidence"][index], 1 - terms["correct"][index]).aurc)


def _scores(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of a prediction, and [difference, standard error] of its area from the area of each rival."""
    generator = np.random.default_rng(0)
    count = len(own["nll"])
    chosen = [generator.integers(count, size=count) for _ in range(RESAMPLES)]

    def gap(rival: Mapping[str, Any]) -> list[float]:
        differences = [_area(own, index) - _area(rival, index) for index in chosen]
        return [round(_area(own) - _area(rival), 5), round(float(np.std(differences)), 5)]

    return {
        "nll": round(float(own["nll"].mean()), 4),
        "accuracy": round(float(own["correct"].mean()), 4),
        "aurc": round(_area(own), 5),
        **dict(zip(RIVALS, map(gap, rivals), strict=True)),
    }


def blocks(subjects: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of scores of all held-out terms."""
    lines = []
    for name, found in subjects.items():
        for way, row in found.get("scores", {}).items():
            gaps = [
                f"{row[rival][0]:+.4f} ± {row[rival][1]:.4f}" if rival in row and way != rival else "-"
                for rival in RIVALS
            ]
            lines.append([name, way, f"{row['nll']:.3f}", f"{row['accuracy']:.3f}", f"{row['aurc']:.4f}", *gaps])
    heads = ["posterior", "prediction", "NLL", "accuracy", "AURC", *(f"less that of the {rival}" for rival in RIVALS)]
    return {"scores": table(heads, lines)}
