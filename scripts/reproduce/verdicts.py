"""Check that the verdict on a run says if its epistemic uncertainty is right: good and bad runs, exact posteriors.

    python -m scripts.reproduce.verdicts               # runs missing in docs/results/verdicts.json

Every run is one of ``BayesianTrainer`` on a target of ``gold_targets``. Its verdict is compared with the ratio of its
epistemic uncertainty (EU) to the gold's. All measurements are kept, and a later call makes only missing runs. The page
has the verdicts by the rules of the time at which it is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import default_data_collator, set_seed
from transformers.utils import logging

from hf_bayes import (
    BAOABConfig,
    BayesianTrainer,
    BayesianTrainingArguments,
    EnsembleConfig,
    LaplaceConfig,
    MAPConfig,
    MeanFieldConfig,
    SGHMCConfig,
    SGLDConfig,
    SGNHTConfig,
    SWAGConfig,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.diagnostics.measurements import Measurements
from hf_bayes.diagnostics.verdict import Diagnostics
from scripts.reproduce.gold_chains import GOLDS, Gold, load
from scripts.reproduce.gold_runs import distance, members_of
from scripts.reproduce.gold_targets import FeaturesConfig, FeaturesForSequenceClassification, Target, target
from scripts.reproduce.report import RESULTS, keep, table

NAME = "verdicts"
TOLERANCE = 0.15
"""The relative error of EU up to which a run counts as right."""


FIELDS = [field.name for field in dataclasses.fields(Measurements)]
WORDS = {True: "yes", False: "no", None: "not known"}


class Case(NamedTuple):
    """A run.

    Attributes:
        method: its config.
        epochs: passes of one chain over the data.
        learning_rate: None leaves it to the method.
        batch: rows of an update of a chain.
    """

    method: MethodConfig
    epochs: float = 30
    learning_rate: float | None = None
    batch: int = 64


CHAINS: dict[str, Any] = {"num_chains": 16, "draws_per_chain": 25, "mirrored": False}
SHORT: dict[str, Any] = {"num_chains": 16, "draws_per_chain": 8, "mirrored": False}
HAND_SET: dict[str, Any] = {"num_chains": 4, "draws_per_chain": 25, "warm_start_steps": 240}

CASES = {
    "SGHMC, nothing set": Case(SGHMCConfig(**CHAINS)),
    "BAOAB, nothing set": Case(BAOABConfig(**CHAINS)),
    "SGNHT, nothing set": Case(SGNHTConfig(**CHAINS)),
    "SGLD, nothing set": Case(SGLDConfig(**CHAINS)),
    "SGHMC, 10 times the heating": Case(SGHMCConfig(**CHAINS, heating=1.5)),
    "SGHMC, a tenth of the heating": Case(SGHMCConfig(**CHAINS, heating=0.015)),
    "SGHMC, batches of 8": Case(SGHMCConfig(**CHAINS), epochs=6, batch=8),
    "SGHMC, 5 epochs": Case(SGHMCConfig(**SHORT), epochs=5),
    "mean-field VI": Case(MeanFieldConfig(num_chains=1, num_draws=1), epochs=100),
    "SWAG": Case(SWAGConfig(num_chains=1), epochs=60, learning_rate=0.01),
    "Laplace, diagonal": Case(LaplaceConfig(num_chains=1, structure="diagonal")),
    "Laplace, low rank": Case(LaplaceConfig(num_chains=1, structure="low_rank")),
    "Laplace, K-FAC": Case(LaplaceConfig(num_chains=1, structure="kronecker")),
    "MAP": Case(MAPConfig()),
    "deep ensemble": Case(EnsembleConfig(num_chains=8)),
    "SGHMC, learning rate 0.01": Case(SGHMCConfig(**HAND_SET), learning_rate=0.01),
    "SGHMC, learning rate 0.1": Case(SGHMCConfig(**HAND_SET), learning_rate=0.1),
    "SGHMC, learning rate 1": Case(SGHMCConfig(**HAND_SET), learning_rate=1.0),
    "SGLD, learning rate 1": Case(SGLDConfig(**HAND_SET), learning_rate=1.0),
    "SGHMC, no warm start": Case(SGHMCConfig(**CHAINS, warm_start_steps=0)),
    "Laplace, full": Case(LaplaceConfig(num_chains=1, structure="full")),
    "SGHMC, mirrored pairs": Case(SGHMCConfig(num_chains=16, draws_per_chain=25)),
}
UNSEEN = [
    "SGHMC, nothing set", "SGHMC, 10 times the heating", "SGHMC, a tenth of the heating", "SGHMC, 5 epochs",
    "mean-field VI", "Laplace, diagonal", "Laplace, K-FAC", "MAP", "SGHMC, learning rate 0.1",
]  # fmt: skip
"""Runs on a target that no rule was changed for."""

PLAN = {
    "sections2": list(CASES),
    "sections12": ["Laplace, diagonal", "Laplace, K-FAC", "mean-field VI"],
    "domains10": UNSEEN,
    "intents25": ["Laplace, K-FAC"],
}  # fmt: skip


class Idea(NamedTuple):
    """An idea that verdicts have in common.

    Attributes:
        mark: words that every verdict of this idea has, and no verdict of a later idea needs.
        says: the idea in a sentence.
        advice: what to do.
    """

    mark: str
    says: str
    advice: str


IDEAS = (
    Idea("is right nevertheless", "the size of EU is right, and single predictions need more independent draws",
         "more draws or a longer burn-in; until then, the mean of EU over many inputs"),
    Idea("on their way from their start", "the chains are still near their start, and EU is too small",
         "longer burn-in, larger learning rate"),
    Idea("gradient noise heats", "minibatches heat the chains, and EU is too large",
         "larger batch, lower learning rate"),
    Idea("draws are too wide", "the Gaussian is too wide where the data decide, and EU is too large by about as much",
         "`structure='kronecker'` or `'full'`, or a sampler"),
    Idea("draws are too narrow", "the Gaussian is too narrow where the data decide, and EU is too small by about as "
         "much", "`structure='kronecker'` or `'full'`, or a sampler"),
    Idea("move by the exact energy", "the spread of the Gaussian is right, but its mean or a width is wrong: EU is too "
         "large", "a sampler"),
    Idea("convergence not defined", "members of an optimiser are no draws, and their EU is not the posterior's",
         "a sampler or a Laplace approximation"),
    Idea("converged", "nothing is wrong", "-"),
)  # fmt: skip
"""The first idea whose mark is in a verdict is its idea."""


def trained(rows: Target, case: Case, directory: str) -> BayesianTrainer:
    """Return the trainer after its run."""
    set_seed(0)
    config = FeaturesConfig(num_labels=rows.num_classes, problem_type="single_label_classification")
    arguments = BayesianTrainingArguments(
        directory, learning_rate=case.learning_rate, num_train_epochs=case.epochs,
        per_device_train_batch_size=case.batch, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, probe_steps=0,
    )  # fmt: skip
    pairs = zip(rows.features, rows.labels, strict=True)
    trainer = BayesianTrainer(
        model=FeaturesForSequenceClassification(config), method=case.method, args=arguments, subspace="last_layer",
        train_dataset=[{"features": row, "labels": label} for row, label in pairs],
        data_collator=default_data_collator,
    )  # fmt: skip
    trainer.train()
    return trainer


def measured(rows: Target, gold: Gold, case: Case) -> dict[str, Any]:
    """Run a case; return its measurements, and its EU relative to the gold's."""
    clock = time.process_time()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = trained(rows, case, directory).posterior
    assert posterior is not None
    found = {name: posterior.config.diagnostics[name] for name in FIELDS if name in posterior.config.diagnostics}
    scores = distance(rows.member_logits(members_of(posterior.approximation)).double(), gold)
    return {"measurements": found, **scores, "seconds": round(time.process_time() - clock, 1)}


def judged(run: Mapping[str, Any]) -> Diagnostics:
    """Return the measurements of a run with the verdict by the rules of now. NaN is null in the record."""
    found = run["measurements"]
    return Diagnostics(
        **{**found, "rhat": math.nan if found["rhat"] is None and found["num_values"] else found["rhat"]}
    )


def agrees(run: Mapping[str, Any]) -> bool:
    """Return whether the verdict is "converged" for an EU within the tolerance, and only then."""
    return (judged(run).converged is True) == (abs(run["eu"] - 1) <= TOLERANCE)


def size_agrees(run: Mapping[str, Any]) -> bool:
    """Return whether the verdict calls the size of EU right if EU is within the tolerance, and only then."""
    return (judged(run).epistemic_size == "right") == (abs(run["eu"] - 1) <= TOLERANCE)


def experiment() -> dict[str, Any]:
    """Return the record after the missing runs, on all targets that have a gold."""
    path = RESULTS / f"{NAME}.json"
    record = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "runs": {}}
    for name in (name for name in PLAN if (GOLDS / f"{name}.safetensors").exists()):
        rows, gold = target(name), load(name)
        runs = record["runs"].setdefault(name, {})
        for label in PLAN[name]:
            if label not in runs:
                runs[label] = measured(rows, gold, CASES[label])
                record["seconds"] = round(record["seconds"] + runs[label]["seconds"])
                path.write_text(json.dumps(record, indent=1) + "\n")
                print(name, label, f"{runs[label]['eu']:.3f}", judged(runs[label]).verdict, flush=True)
    return {key: record[key] for key in ("seconds", "runs")}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    runs = [(name, label, run) for name, found in record["runs"].items() for label, run in found.items()]
    rows = [
        [name, label, f"{run['eu']:.2f}", _spread(judged(run)), _drift(judged(run)),
         judged(run).epistemic_size or "not known",
         _yes(size_agrees(run)), WORDS[judged(run).converged], _yes(agrees(run))]
        for name, label, run in runs
    ]  # fmt: skip
    return {
        "count": "\n".join(_count(runs, gold) for gold in (None, *record["runs"])),
        "runs": table(
            ["gold", "run", "EU / gold", "spread", "drift", "size of EU", "agrees", "converged", "agrees"], rows
        ),
        **_grouped(runs),
    }


def idea_of(verdict: str) -> Idea:
    """Return the idea of a verdict.

    Raises:
        ValueError: for a verdict of no idea.
    """
    for idea in IDEAS:
        if idea.mark in verdict:
            return idea
    raise ValueError(f"no idea has the words of the verdict {verdict!r}: add one to IDEAS")


def _grouped(runs: list[tuple[str, str, Mapping[str, Any]]]) -> dict[str, str]:
    """Return the table of ideas with their runs, and the verdict of the first run of each idea in full."""
    verdicts = [(name, label, judged(run).verdict) for name, label, run in runs]
    groups = {idea: [found for found in verdicts if idea_of(found[2]) == idea] for idea in IDEAS}
    rows = [[idea.says, idea.advice, _named(group)] for idea, group in groups.items() if group]
    examples = [f"- `{group[0][0]}`, {group[0][1]}: {group[0][2]}" for group in groups.values() if group]
    return {"verdicts": table(["it says", "what to do", "runs"], rows), "examples": "\n".join(examples)}


def _named(group: list[tuple[str, str, str]]) -> str:
    """Return the names of runs, by gold."""
    golds: dict[str, list[str]] = {}
    for name, label, _ in group:
        golds.setdefault(name, []).append(label)
    return "<br>".join(f"`{name}`: {'; '.join(labels)}" for name, labels in golds.items())


def _count(runs: list[tuple[str, str, Mapping[str, Any]]], gold: str | None) -> str:
    own = [run for name, _, run in runs if gold in (None, name)]
    where = "All" if gold is None else f"`{gold}`"
    return (
        f"- {where}: of {len(own)} runs, the verdict's word on the size of EU agrees in {sum(map(size_agrees, own))}, "
        f'and "converged" in {sum(map(agrees, own))}.'
    )


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _spread(found: Diagnostics) -> str:
    if found.informed_spread is None:
        return "-"
    return f"{found.informed_spread:.2f} ± {found.informed_spread_std_error:.2f}"


def _drift(found: Diagnostics) -> str:
    return "-" if found.epistemic_drift is None else f"{found.epistemic_drift:.2f}"


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep(NAME, experiment)


if __name__ == "__main__":
    main()
