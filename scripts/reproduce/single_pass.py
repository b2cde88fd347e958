"""A single pass against members: rank correlations of epistemic uncertainty, sources of the variance, and cost.

    python -m scripts.reproduce.single_pass

The classifier is the MiniLM encoder with LoRA in its last two blocks, trained to find the module of a docstring of
Python's library. The language model is a small Llama, trained on docstrings, with LoRA in its last two blocks. Both
have posteriors of four kinds. A later call adds only missing subjects.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    LaplaceConfig,
    MeanFieldConfig,
    Posterior,
    SWAGConfig,
    fit_laplace,
)
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Diagonal
from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.fit.single_pass import fit_variance_factor
from hf_bayes.metrics.functions import risk_coverage
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.linearised import gaussian_outputs
from scripts.quickstart_base import pretrain_base, train_tokenizer, windows
from scripts.quickstart_corpora import corpora
from scripts.reproduce.encoder_table import encoder
from scripts.reproduce.report import RESULTS, as_text, keep, table
from scripts.reproduce.single_pass_more import against_many, cross_fitted, ranks_table, scores_table, student_of

NAME = "single_pass"
MODULES = ("argparse", "collections", "decimal", "email.message", "logging", "tkinter")
TASKS = ["classifier", "language model"]
KINDS = ("diagonal Laplace", "SWAG"), ("mean field", "K-FAC Laplace")
"""The posteriors, in the order of their runs."""

LENGTH = 16
"""The number of tokens of a row of the classifier."""

SETTINGS = {"tokens": LENGTH, "members": 64}
"""The settings of a subject; figures of other settings are made again."""

DIRECTIONS = (2, 1)
RANKS = (16, 8, 4)
WAYS = (
    "32 other members", "8 other members", "linearised", *(f"backward, {number}" for number in DIRECTIONS),
    *(f"low rank, {rank}" for rank in RANKS), "diagonal",
)  # fmt: skip

Batch = dict[str, Tensor]


@dataclass
class Subject:
    """A function that trains a LoRA once, its training rows, and batches of other rows by set."""

    task: str
    base: Callable[[], Any]
    lora: Callable[[], Any]
    rows: list[dict[str, Any]]
    sets: dict[str, list[Batch]] = field(default_factory=dict)
    unlabelled: list[dict[str, Any]] = field(default_factory=list)
    """More rows for a student."""


def docstrings() -> tuple[list[str], list[int]]:
    """Return first paragraphs of docstrings of Python's library, and the number of the module of each."""
    found: dict[str, int] = {}
    for label, name in enumerate(MODULES):
        owners = [value for _, value in inspect.getmembers(importlib.import_module(name))]
        methods = [value for owner in owners if inspect.isclass(owner) for _, value in inspect.getmembers(owner)]
        own = [v for v in owners + methods if str(getattr(v, "__module__", "")).split(".")[0] == name.split(".")[0]]
        texts = sorted({" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()) for value in own})
        found |= dict.fromkeys([text for text in texts if len(text.split()) >= 4][:60], label)
    return list(found), list(found.values())


def classifier() -> Subject:
    """Train the classifier. Its held-out rows are docstrings; the other text is prose, and the same prose in rot13."""
    tokenizer = AutoTokenizer.from_pretrained(str(encoder()))

    def base() -> Any:
        set_seed(0)  # the head is new
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return AutoModelForSequenceClassification.from_pretrained(str(encoder()), num_labels=len(MODULES), **off)

    def encoded(texts: list[str]) -> list[dict[str, Any]]:
        found = tokenizer(texts, truncation=True, padding="max_length", max_length=LENGTH)
        pairs = zip(found["input_ids"], found["attention_mask"], strict=True)
        return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]

    texts, labels = docstrings()
    rows = [row | {"labels": label} for row, label in zip(encoded(texts), labels, strict=True)]
    prose = corpora()
    other = [line for name in ("test", "rot13") for line in "\n".join(prose[name]).splitlines() if len(line) > 40]
    sets = {"held out": rows[::2][:104], "other": encoded(other[:: max(1, len(other) // 104)][:104])}
    train = rows[1::2]
    targets = ["query", "value", "output.dense"]
    lora = functools.cache(lambda: adapted(base(), "SEQ_CLS", targets, [4, 5], train, steps=60))
    more = encoded([line for line in "\n".join(prose["pretrain"]).splitlines() if len(line) > 40][::50][:300])
    found = {k: batches(v, 26) for k, v in sets.items()}
    return Subject("sequence_classification", base, lora, train, found, unlabelled=more)


def language_model(directory: Path) -> Subject:
    """Train the language model. Its held-out text is prose of the same kind as the training text; the other is code."""
    texts = corpora()
    tokenizer = train_tokenizer(texts["pretrain"])
    pretrain_base(texts["pretrain"], tokenizer, directory, length=64, epochs=0.15, batch_size=8)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory)

    def rows(name: str, limit: int) -> list[dict[str, Any]]:
        found = windows(texts[name], tokenizer, length=64, limit=limit)["input_ids"]
        return [{"input_ids": list(ids), "labels": list(ids)} for ids in found]

    train = rows("finetune", 120)
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = functools.cache(lambda: adapted(base(), "CAUSAL_LM", targets, [1, 2], train, steps=90))
    sets = {"held out": batches(rows("test", 8), 4), "other": batches(rows("code", 8), 4)}
    return Subject("causal_lm", base, lora, train, sets)


def adapted(base: Any, task: str, targets: list[str], blocks: list[int], rows: list[Any], *, steps: int) -> Any:
    """Return the model with a trained LoRA in these blocks."""
    set_seed(0)
    config = LoraConfig(
        task_type=task, r=8, lora_alpha=16, target_modules=targets, layers_to_transform=blocks, lora_dropout=0.0
    )
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))[:16].tolist()
        loss = model(**default_data_collator([rows[index] for index in chosen])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def posteriors(subject: Subject) -> dict[str, Callable[[], Posterior]]:
    """Return name -> function that makes a posterior. Those by training start anew from the same base."""

    def laplace(structure: str) -> Posterior:
        return fit_laplace(subject.lora(), subject.rows, LaplaceConfig(structure=structure, prior_std=0.05))

    def by_training(method: Any, steps: int) -> Posterior:
        config = subject.lora().peft_config["default"]
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=get_peft_model(subject.base(), dataclasses.replace(config, inference_mode=False)),
                method=method,
                args=BayesianTrainingArguments(
                    output_dir=directory, learning_rate=3e-3, max_steps=steps, per_device_train_batch_size=16,
                    map_updates=0, use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no",
                    save_strategy="no", trunk_memory_gib=1.0,
                ),
                train_dataset=Dataset.from_list(subject.rows),
                data_collator=default_data_collator,
            )  # fmt: skip
            trainer.train()
            return trainer.posterior

    prior = {"lora_": 0.1, "classifier": 1.0} if subject.task != "causal_lm" else {"lora_": 0.1}
    return {
        "diagonal Laplace": lambda: laplace("diagonal"),
        "K-FAC Laplace": lambda: laplace("kronecker"),
        "SWAG": lambda: by_training(SWAGConfig(num_chains=1, prior_std=prior), 200),
        "mean field": lambda: by_training(MeanFieldConfig(num_chains=1, prior_std=prior), 200),
    }


def batches(rows: list[dict[str, Any]], size: int) -> list[Batch]:
    """Return rows as batches."""
    return [default_data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]


@torch.no_grad()
def read(model: Any, sets: Mapping[str, list[Batch]]) -> dict[str, Tensor]:
    """Return the epistemic uncertainty of all terms of each set."""
    return {
        name: torch.cat([model(**without_labels(batch)).epistemic.flatten() for batch in found]).double()
        for name, found in sets.items()
    }


def without_labels(batch: Batch) -> Batch:
    """Return the inputs of a batch."""
    return {name: value for name, value in batch.items() if name != "labels"}


def compared(subject: Subject, posterior: Posterior, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Add the figures of each missing way to predict to ``found``, against 32 and 64 members, and save after each."""
    rows: dict[str, Any] = found.setdefault("ways", {})
    kind: Any = MODELS[subject.task]
    model = kind.from_pretrained(
        posterior, base_model=subject.base(), members=SETTINGS["members"], prediction="members", check_base=False
    )
    theta = model.theta.detach().clone()

    def members(some: Tensor) -> Callable[[], Any]:
        return lambda: model.linearise(None).show(some)

    ways: dict[str, Callable[[], Any]] = {
        "32 other members": members(theta[32:]),
        "8 other members": members(theta[32:40]),
        **{
            f"low rank, {rank}": functools.partial(model.single_pass, structure="low_rank", rank=rank) for rank in RANKS
        },
        "diagonal": lambda: model.single_pass(structure="diagonal"),
    }
    if subject.task != "causal_lm":
        ways["linearised"] = lambda: model.linearise("monte_carlo")
        ways |= {
            f"backward, {number}": functools.partial(model.single_pass, structure="backward", rank=number)
            for number in DIRECTIONS
        }
    members(theta[:32])()
    reference = read(model, subject.sets)
    members(theta)()
    more = read(model, subject.sets)
    found["eu"] = round(float(torch.cat(list(reference.values())).mean()), 5)
    plain = subject.base().eval()
    batch = without_labels(subject.sets["held out"][0])
    for name, choose in ways.items():
        if name in rows:
            continue
        choose()
        own = read(model, subject.sets)
        ranks = {f"rank {key}": round(rank_correlation(reference[key], own[key]), 3) for key in reference}
        if "members" not in name:
            ranks |= {f"rank 64 {key}": round(rank_correlation(more[key], own[key]), 3) for key in reference}
        ratio = sum(float(v.sum()) for v in own.values()) / sum(float(v.sum()) for v in more.values())
        rows[name] = ranks | {"ratio": round(ratio, 3), "cost": round(cost(model, plain, batch), 2)}
        save()
    model.detach()


def scored(subject: Subject, posterior: Posterior) -> dict[str, dict[str, float]]:
    """Return NLL and area under the risk-coverage curve of each way to predict, on half of the held-out rows.

    The other half fits the factor of all variances.
    """
    kind: Any = MODELS[subject.task]
    rows = subject.sets["held out"]
    calibrated = fit_variance_factor(
        posterior, unbatched(rows[: len(rows) // 2]), base_model=subject.base(), collate=default_data_collator
    )
    found: dict[str, dict[str, float]] = {}
    for name, given in {"uncalibrated": posterior, "calibrated": calibrated}.items():
        model = kind.from_pretrained(given, base_model=subject.base(), members=32, check_base=False)
        theta = model.theta.detach().clone()
        ways = {f"single pass, {name}": model.single_pass}
        if name == "uncalibrated":
            mean = posterior.approximation.means
            ways |= {
                "mean network": lambda model=model, mean=mean: model.linearise(None).show(mean.to(model.theta)),
                "32 members": lambda model=model, theta=theta: model.linearise(None).show(theta),
            }
        for label, choose in ways.items():
            choose()
            found[label] = score(model, rows[len(rows) // 2 :])
        model.detach()
    factor = next(iter(calibrated.config.layer_factors.values()))
    found["single pass, calibrated"]["factor"] = round(factor, 3)
    return found


@torch.no_grad()
def score(model: Any, batches: list[Batch]) -> dict[str, float]:
    """Return NLL, accuracy, and area under the risk-coverage curve by confidence."""
    each = [model.evaluate_batch(dict(batch))[0] for batch in batches]
    nll, correct, confidence = (torch.cat([x[key].double() for x in each]) for key in ("nll", "correct", "confidence"))
    aurc = risk_coverage(1 - confidence.numpy(), 1 - correct.numpy()).aurc
    return {"nll": round(float(nll.mean()), 4), "accuracy": round(float(correct.mean()), 4), "aurc": round(aurc, 4)}


def unbatched(batches: list[Batch]) -> list[dict[str, Any]]:
    """Return the rows of batches."""
    return [
        {name: value[index] for name, value in batch.items()}
        for batch in batches
        for index in range(len(batch["labels"]))
    ]


@torch.no_grad()
def cost(model: Any, plain: Any, batch: Batch, rounds: int = 3) -> float:
    """Return the median processor time of a pass over that of the model without adapter, in turn."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(rounds + 1):
        for place, call in enumerate((model, plain)):
            begin = time.process_time()
            call(**batch)
            found[place].append(time.process_time() - begin)
    return statistics.median(found[0][1:]) / statistics.median(found[1][1:])


def sources(subject: Subject, posterior: Posterior) -> dict[str, dict[str, float]]:
    """Return the total variance of the logits from one kind of weights at a time, over that of the linearised model."""
    batch = {k: v[:24] for k, v in without_labels(subject.sets["held out"][0]).items()}
    kind: Any = MODELS[subject.task]
    model = kind.from_pretrained(posterior, base_model=subject.base(), prediction="members", check_base=False)
    gaussian = posterior.approximation
    assert isinstance(gaussian, Gaussian)
    stds = model.layout.unflatten(gaussian.covariances[0].variance.sqrt())
    kinds = ("classifier", *(f"{m}.lora_{f}" for m in ("query", "value", "attention.output.dense") for f in "AB"))
    groups = {k: [n for n in stds if k in n] for k in kinds}
    named = {name for names in groups.values() for name in names}
    groups |= {f"output.dense.lora_{f}": [n for n in stds if n not in named and f"lora_{f}" in n] for f in "AB"}
    found: dict[str, dict[str, float]] = {}
    for label, names in {"all": list(stds), **groups}.items():
        parts = {n: std if n in names else torch.full_like(std, 1e-12) for n, std in stds.items()}
        own = Gaussian(gaussian.means, (Diagonal(model.layout.flatten(parts)),))
        model.posterior = dataclasses.replace(posterior, approximation=own)
        whole = gaussian_outputs(model, own, batch).covariance.diagonal(dim1=-2, dim2=-1).sum()
        found[label] = {"linearised": float(whole)}
        for structure in ("low_rank", "diagonal"):
            model.single_pass(structure=structure)
            with torch.no_grad():
                total = model.predictor.outputs(model, batch)[1].diagonal(dim1=-2, dim2=-1).sum()
            found[label][structure] = round(float(total / whole), 3)
    whole_variance = found["all"]["linearised"]
    return {k: v | {"linearised": round(v["linearised"] / whole_variance, 4)} for k, v in found.items()}


def kept(directory: Path | None, label: str, make: Callable[[], Posterior]) -> Posterior:
    """Return the posterior of an earlier call in ``directory``, or make it and keep it there."""
    if directory is None:
        return make()
    own = directory / label.replace(" ", "_").replace(",", "")
    if not own.exists():
        make().save_pretrained(own)
    return Posterior.from_pretrained(own)


def experiment(path: Path, tasks: Sequence[str], posteriors_at: Path | None = None) -> dict[str, Any]:
    """Return the record after the missing figures, each of which is saved when it is there.

    Args:
        path: the record.
        tasks: "classifier", "language model" or both.
        posteriors_at: a folder that keeps the posteriors for later calls; None keeps none.
    """
    record = json.loads(path.read_text()) if path.exists() else {}
    record.pop("seconds", None)

    def save() -> None:
        path.write_text(as_text(record))

    with tempfile.TemporaryDirectory() as directory:
        makers: dict[str, Callable[[], Subject]] = {
            "classifier": functools.cache(classifier),
            "language model": functools.cache(lambda: language_model(Path(directory))),
        }
        for task, kind in ((task, kind) for some in KINDS for task in makers if task in tasks for kind in some):
            label = f"{task}, {kind}"
            found = record.setdefault("subjects", {}).setdefault(label, {})
            if is_complete(found, task):
                continue
            if found.get("settings") != SETTINGS:  # of an earlier version of this script
                found.clear()
                found["settings"] = SETTINGS
            subject = makers[task]()
            posterior = kept(posteriors_at, label, posteriors(subject)[kind])
            if "many" not in found:
                student = student_of(subject, posterior)
                found["many"] = against_many(subject, posterior, student, read=read, cost=cost)
                found["cross-fitted"] = cross_fitted(subject, posterior, student)
                save()
            compared(subject, posterior, found, save)
            if task == "classifier" and "scores" not in found:
                found["scores"] = scored(subject, posterior)
            if "sources" not in record:
                record["sources"] = sources(subject, posterior)
            save()
            print(label, found, flush=True)
    return record


def is_complete(found: Mapping[str, Any], task: str) -> bool:
    """Check that a subject has all its figures."""
    by_backward = {"linearised", *(way for way in WAYS if way.startswith("backward"))}
    ways = set(WAYS) - (by_backward if task == "language model" else set())
    return (
        found.get("settings") == SETTINGS
        and "many" in found
        and ways <= set(found.get("ways", {}))
        and ("scores" in found or task != "classifier")
    )


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    lines, costs = [], []
    found_ways = {way for found in record["subjects"].values() for way in found["ways"]}
    shown = [way for way in (*WAYS, "16 other members") if way in found_ways]
    for name, found in record["subjects"].items():
        rows = [found["ways"].get(way) for way in shown]
        for key in ("held out", "other"):
            lines.append([name, key, *("-" if row is None else _ranks(row, key) for row in rows)])
        both = ["-" if row is None else f"{row['ratio']:.2f} / {row['cost']:.1f}" for row in rows]
        costs.append([name, f"{found['eu']:.4f}", *both])
    scores = [
        [name, way, *(f"{row[key]:.3f}" for key in ("nll", "accuracy", "aurc")), str(row.get("factor", "-"))]
        for name, found in record["subjects"].items()
        for way, row in found.get("scores", {}).items()
    ]
    shares = [[k, f"{v['linearised']:.3f}", f"{v['low_rank']:.2f}", f"{v['diagonal']:.3f}"]
              for k, v in record["sources"].items()]  # fmt: skip
    return {
        "many": _filled(*ranks_table(record)),
        "cross-fitted": _filled(*scores_table(record)),
        "ranks": table(["posterior", "text", *shown], lines),
        "costs": table(["posterior", "mean EU", *shown], costs),
        "scores": table(["posterior", "prediction", "NLL", "accuracy", "AURC", "factor"], scores),
        "sources": table(["random weights", "share", "low rank, 16 / linearised", "diagonal / linearised"], shares),
    }


def _filled(heads: list[str], lines: list[list[str]]) -> str:
    return table(heads, lines) if lines else "No run is kept yet."


def _ranks(row: Mapping[str, Any], key: str) -> str:
    more = row.get(f"rank 64 {key}")
    return f"{row[f'rank {key}']:.2f}" + ("" if more is None else f" ({more:.2f})")


def main() -> None:
    """Run the missing subjects, and make the page."""
    parser = argparse.ArgumentParser(description="Compare a single pass with members.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="the models to compare")
    parser.add_argument("--posteriors", type=Path, help="a folder that keeps the posteriors for later calls")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep(NAME, lambda: experiment(RESULTS / f"{NAME}.json", arguments.tasks, arguments.posteriors))


if __name__ == "__main__":
    main()
