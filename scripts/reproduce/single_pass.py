"""A single pass against members: rank correlations of epistemic uncertainty, scores, sources of the variance, and cost.

    python -m scripts.reproduce.single_pass --work out/single_pass

The classifier is the MiniLM encoder with LoRA in its last two blocks, trained to find the module of a docstring of
Python's library. The language model is a small Llama, trained on docstrings, with LoRA in its last two blocks or in all
three. All have posteriors of four kinds. A later call adds only missing figures. With ``--work`` it also finds the
posteriors and the predictions of their members again.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from scripts.reproduce import single_pass_modules as modules
from scripts.reproduce import single_pass_ranks as ranks
from scripts.reproduce import single_pass_scores as scores
from scripts.reproduce import single_pass_sources as sources
from scripts.reproduce.report import RESULTS, as_text, keep
from scripts.reproduce.single_pass_subjects import LENGTH, Subject, classifier, kept, language_model, posteriors

NAME = "single_pass"
TASKS = ("classifier", "language model", "language model, all blocks")
KINDS = ("diagonal Laplace", "SWAG", "mean field", "K-FAC Laplace")

SETTINGS = {"tokens": LENGTH, "reference": sum(ranks.GROUPS[index] for index in ranks.HALVES)}
"""The settings of a subject; figures of other settings are made again."""


def experiment(path: Path, labels: Iterable[tuple[str, str]], work: Path | None = None) -> dict[str, Any]:
    """Return the record after the missing figures, each of which is saved when it is there.

    Args:
        path: the record.
        labels: (task, kind) of each posterior.
        work: a folder that keeps the posteriors and the predictions of members for later calls; None keeps none.
    """
    record = json.loads(path.read_text()) if path.exists() else {}

    def save() -> None:
        path.write_text(as_text(record))

    with tempfile.TemporaryDirectory() as directory:
        makers: dict[str, Callable[[], Subject]] = {
            "classifier": functools.cache(classifier),
            "language model": functools.cache(lambda: language_model(Path(directory))),
            "language model, all blocks": functools.cache(lambda: language_model(Path(directory), [0, 1, 2])),
        }
        for task, kind in labels:
            label = f"{task}, {kind}"
            found = record.setdefault("subjects", {}).setdefault(label, {})
            if is_complete(found, task):
                continue
            if found.get("settings") != SETTINGS:  # of an earlier version of this script
                found.clear()
                found["settings"] = SETTINGS
            begin = time.process_time()
            add_figures(makers[task](), task, kind, record, save, work)
            found["processor seconds"] = round(found.get("processor seconds", 0) + time.process_time() - begin)
            save()
            print(label, found, flush=True)
    return record | {"seconds": sum(found.get("processor seconds", 0) for found in record["subjects"].values())}


def add_figures(
    subject: Subject, task: str, kind: str, record: dict[str, Any], save: Callable[[], None], work: Path | None
) -> None:
    """Add the missing figures of a posterior to the record."""
    label = f"{task}, {kind}"
    found = record["subjects"][label]
    posterior = kept(work, label, posteriors(subject)[kind])
    student = kept(work, f"{label}, student", lambda: scores.student_of(subject, posterior))
    groups = ranks.members_of(subject, posterior, work, label)
    ranks.compared(subject, posterior, student, found, save, groups)
    if not has_scores(found, task):
        found["scores"] = scores.cross_fitted(
            subject, posterior, student, groups["held out"][ranks.HALVES[0]].log_probs
        )
        save()
    if (task, kind) == (TASKS[0], KINDS[0]):
        record["sources"] = sources.sources(subject, posterior)
        record["modules"] = modules.modules(subject, posterior)


def has_scores(found: Mapping[str, Any], task: str) -> bool:
    """Check that a subject has the scores of all ways to predict."""
    rows = found.get("scores", {})
    wanted = {*scores.WAYS, scores.ANOTHER["sequence_classification" if task == TASKS[0] else "causal_lm"][0]}
    return wanted <= set(rows) and all(set(scores.RIVALS) <= set(row) for row in rows.values())


def is_complete(found: Mapping[str, Any], task: str) -> bool:
    """Check that a subject has all its figures."""
    ways = set(ranks.WAYS) - (set() if task == TASKS[0] else ranks.CLASSIFIERS_ONLY)
    return found.get("settings") == SETTINGS and ways <= set(found.get("ways", {})) and has_scores(found, task)


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    subjects = {label: found for label, found in record["subjects"].items() if found}
    return (
        ranks.blocks(subjects)
        | scores.blocks(subjects)
        | sources.blocks(record["sources"])
        | (modules.blocks(record["modules"]) if "modules" in record else {})
    )


def main() -> None:
    """Run the missing posteriors, and make the page."""
    parser = argparse.ArgumentParser(description="Compare a single pass with members.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="the models to compare")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="the posteriors to compare")
    parser.add_argument("--work", type=Path, help="a folder that keeps posteriors and members for later calls")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    labels = [(task, kind) for kind in arguments.kinds for task in arguments.tasks]
    keep(NAME, lambda: experiment(RESULTS / f"{NAME}.json", labels, arguments.work))


if __name__ == "__main__":
    main()
