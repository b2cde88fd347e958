"""The figures of ``single_pass`` on epistemic uncertainty (EU): rank correlations with members, ratios and costs.

All members are read once. What they predict is kept for groups of members, so that the EU of any number of groups, of
the halves of the reference and of other members follows without another pass.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import set_seed

from hf_bayes import Posterior
from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.metrics.functions import ood_auroc
from hf_bayes.models.attaching import MODELS
from scripts.reproduce.report import table
from scripts.reproduce.single_pass_subjects import Batch, Subject, folder, without_labels

GROUPS = (8, 24, 32, 32)
"""The numbers of members of the groups. The first two are the other members, the rest is the reference."""

OTHERS = {"8 other members": (0,), "32 other members": (0, 1)}
HALVES = 2, 3
"""The groups of the reference."""

RESAMPLES = 200
"""The number of resamples of the standard error of a rank correlation."""

DIRECTIONS = (2, 1)
RANKS = (16, 8, 4)
WAYS = (
    "32 other members", "8 other members", "linearised", *(f"backward, {number}" for number in DIRECTIONS),
    *(f"low rank, {rank}" for rank in RANKS), "low rank, 16, mean weights", "diagonal", "student",
)  # fmt: skip
CLASSIFIERS_ONLY = {"linearised", *(f"backward, {number}" for number in DIRECTIONS)}


class Group(NamedTuple):
    """The predictions of a group of members for the terms of a set.

    Attributes:
        count: the number of members.
        log_probs: [B, C], of the mixture.
        aleatoric: [B], the mean entropy of the members.
    """

    count: int
    log_probs: Tensor
    aleatoric: Tensor


def epistemic(groups: Sequence[Group]) -> Tensor:
    """Return [B], the mutual information between label and member of all groups together."""
    total = sum(group.count for group in groups)
    probs = sum(group.count / total * group.log_probs.double().exp() for group in groups)
    aleatoric = sum(group.count / total * group.aleatoric.double() for group in groups)
    assert isinstance(probs, Tensor)
    return torch.special.entr(probs).sum(-1) - aleatoric


@torch.no_grad()
def groups_of(model: Any, sets: Mapping[str, list[Batch]]) -> dict[str, list[Group]]:
    """Return the groups of each set, in the order of ``GROUPS``."""
    found: dict[str, list[Group]] = {name: [] for name in sets}
    for theta in model.theta.detach().clone().split(GROUPS):
        model.linearise(None).show(theta)
        for name, batches in sets.items():
            outputs = [model(**without_labels(batch)) for batch in batches]
            log_probs = torch.cat([out.logits.flatten(0, -2) for out in outputs])
            aleatoric = torch.cat([out.aleatoric.flatten() for out in outputs])
            found[name].append(Group(len(theta), log_probs, aleatoric))
    return found


def members_of(subject: Subject, posterior: Posterior, directory: Path | None, label: str) -> dict[str, list[Group]]:
    """Return the groups of each set, as an earlier call has kept them in ``directory``."""
    path = None if directory is None else folder(directory, label).with_suffix(".safetensors")
    if path is not None and path.exists():
        kept = load_file(path)
        return {
            name: [Group(n, *(kept[f"{name}.{i}.{key}"] for key in Group._fields[1:])) for i, n in enumerate(GROUPS)]
            for name in subject.sets
        }
    set_seed(0)
    kind: Any = MODELS[subject.task]
    model = kind.from_pretrained(
        posterior, base_model=subject.base(), members=sum(GROUPS), prediction="members", check_base=False
    )
    found = groups_of(model, subject.sets)
    model.detach()
    if path is not None:
        save_file(
            {
                f"{name}.{index}.{key}": getattr(group, key).contiguous()
                for name, groups in found.items()
                for index, group in enumerate(groups)
                for key in Group._fields[1:]
            },
            path,
        )
    return found


@torch.no_grad()
def read(model: Any, plain: Any, sets: Mapping[str, list[Batch]]) -> tuple[dict[str, Tensor], float]:
    """Return the epistemic uncertainty of all terms of each set, and the cost.

    The cost is the median processor time of a batch, over the median of the model without adapter, in turn.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in sets}
    times: dict[int, list[float]] = {0: [], 1: []}
    for name, batches in sets.items():
        for batch in map(without_labels, batches):
            for place, call in enumerate((model, plain)):
                begin = time.process_time()
                out = call(**batch)
                times[place].append(time.process_time() - begin)
                if call is model:
                    found[name].append(out.epistemic.flatten())
    cost = statistics.median(times[0]) / statistics.median(times[1])
    return {name: torch.cat(parts).double() for name, parts in found.items()}, cost


def compared(
    subject: Subject, posterior: Posterior, student: Posterior, found: dict[str, Any], save: Callable[[], None],
    groups: Mapping[str, list[Group]],
) -> None:  # fmt: skip
    """Add the figures of each missing way to predict to ``found``, against the reference, and save after each."""
    halves = {name: [each[index] for index in HALVES] for name, each in groups.items()}
    reference = {name: epistemic(both) for name, both in halves.items()}
    found["eu"] = round(float(torch.cat(list(reference.values())).mean()), 5)
    found["auroc"] = area(reference)
    found["limit"] = {name: round(limit(*(epistemic([one]) for one in both)), 3) for name, both in halves.items()}
    rows: dict[str, Any] = found.setdefault("ways", {})
    plain = subject.base().eval()
    kind: Any = MODELS[subject.task]
    load = functools.partial(kind.from_pretrained, base_model=subject.base(), check_base=False)

    def add(name: str, model: Any) -> None:
        first = {"held out": subject.sets["held out"][:2]}
        own, spent = read(model, plain, first if name in OTHERS else subject.sets)
        if name in OTHERS:
            own = {key: epistemic([each[index] for index in OTHERS[name]]) for key, each in groups.items()}
        ranks = {key: round(rank_correlation(reference[key], own[key]), 3) for key in reference}
        errors = {f"error, {key}": round(standard_error(reference[key], own[key]), 3) for key in reference}
        ratio = sum(float(v.sum()) for v in own.values()) / sum(float(v.sum()) for v in reference.values())
        rows[name] = ranks | errors | {"ratio": round(ratio, 3), "cost": round(spent, 2), "auroc": area(own)}
        save()

    model = load(posterior, members=32, prediction="members")
    theta = model.theta.detach().clone()
    for name, choose in ways_of(model, theta, is_causal=subject.task == "causal_lm").items():
        if name not in rows:
            choose()
            add(name, model)
    model.detach()
    if "student" not in rows:
        distilled = load(student, prediction="distilled")
        add("student", distilled)
        distilled.detach()


def ways_of(model: Any, theta: Tensor, *, is_causal: bool) -> dict[str, Callable[[], Any]]:
    """Return name -> function that lets the model predict in this way."""
    ways: dict[str, Callable[[], Any]] = {
        "32 other members": lambda: model.linearise(None).show(theta),
        "8 other members": lambda: model.linearise(None).show(theta[:8]),
    }
    if not is_causal:
        ways["linearised"] = lambda: model.linearise("monte_carlo")
        for number in DIRECTIONS:
            ways[f"backward, {number}"] = functools.partial(model.single_pass, structure="backward", rank=number)
    first: dict[str, Any] = {"structure": "low_rank", "rank": 16, "second_order": False}
    ways["low rank, 16, mean weights"] = functools.partial(model.single_pass, **first)
    for rank in RANKS:
        ways[f"low rank, {rank}"] = functools.partial(model.single_pass, structure="low_rank", rank=rank)
    ways["diagonal"] = lambda: model.single_pass(structure="diagonal")
    return ways


def limit(first: Tensor, second: Tensor) -> float:
    """Return the rank correlation with the reference that an EU without noise of members would have.

    If halves of the reference have the rank correlation r, the reference has the reliability R = 2 r / (1 + r) by the
    formula of Spearman and Brown, and sqrt(R) is its correlation with the EU of infinitely many members.
    """
    half = max(0.0, rank_correlation(first, second))
    return float((2 * half / (1 + half)) ** 0.5)


def area(values: Mapping[str, Tensor]) -> float:
    """Return the AUROC of a value as a detector of the other text."""
    pair = [values[name].cpu().numpy() for name in ("held out", "other")]
    is_other = np.repeat([False, True], [len(part) for part in pair])
    return round(ood_auroc(np.concatenate(pair), is_other), 3)


def standard_error(first: Tensor, second: Tensor) -> float:
    """Return the standard error of a rank correlation, by the bootstrap of terms."""
    generator = np.random.default_rng(0)
    chosen = [torch.from_numpy(generator.integers(len(first), size=len(first))) for _ in range(RESAMPLES)]
    return float(np.std([rank_correlation(first[index], second[index]) for index in chosen]))


def blocks(subjects: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of rank correlations, costs and AUROC. Records of earlier versions lack some figures."""
    lines, costs, areas = [], [], []
    for name, found in subjects.items():
        rows = [found["ways"].get(way) for way in WAYS]
        for key in ("held out", "other"):
            each = ["-" if row is None else f"{row[key]:.2f}" for row in rows]
            errors = [row[f"error, {key}"] for row in rows if row is not None and f"error, {key}" in row]
            best = f"{found['limit'][key]:.2f}" if "limit" in found else "-"
            error = f"{min(errors):.2f} to {max(errors):.2f}" if errors else "-"
            lines.append([name, key, found["settings"]["reference"], best, *each, error])
        both = ["-" if row is None else f"{row['ratio']:.2f} / {row['cost']:.1f}" for row in rows]
        costs.append([name, f"{found['eu']:.4f}", *both])
        if "auroc" in found:
            each = [f"{row['auroc']:.2f}" if row is not None and "auroc" in row else "-" for row in rows]
            areas.append([name, f"{found['auroc']:.2f}", *each])
    return {
        "ranks": table(["posterior", "text", "reference", "no noise", *WAYS, "standard error"], lines),
        "costs": table(["posterior", "mean EU", *WAYS], costs),
        "auroc": table(["posterior", "reference", *WAYS], areas),
    }
