"""A distilled student against the members that it imitates and against one network alone.

    python scripts/quickstart.py --output_dir quickstart-output
    python -m scripts.reproduce.distilled --data data_full.json --quickstart quickstart-output

The classifier is the MiniLM encoder with LoRA in its pooler on CLINC150 (Larson et al. 2019), for which ``--data`` is
the published file. The language models are posteriors of ``scripts/quickstart.py``. The students see rows without
labels: of the training set, or of the first half of the windows of the test text and of other text. All figures are of
rows that neither training nor distillation has seen. A later call adds only missing subjects.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, default_data_collator, set_seed

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, EnsembleConfig, Posterior, SGHMCConfig, distil
from hf_bayes.cli.evaluation.windows import windows_of
from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.metrics import ood_auroc
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.models.loading.student_network import network_of
from scripts.reproduce.encoder_table_bench import encoder
from scripts.reproduce.report import continued, table

NAME = "distilled"
Batch = dict[str, Tensor]


@dataclass
class Arguments:
    """The data, and the sizes."""

    data: str = field(metadata={"help": "data_full.json of CLINC150."})
    quickstart: str = field(metadata={"help": "The output folder of scripts/quickstart.py."})
    rows: int = field(default=2000, metadata={"help": "Rows that a student of a classifier sees."})
    train: int = field(default=3000, metadata={"help": "Rows that the classifier is trained on."})
    test: int = field(default=600, metadata={"help": "Rows of the test set, and of the out-of-scope queries."})
    windows: int = field(default=60, metadata={"help": "Windows of the test text, half of them for the student."})


@dataclass
class Subject:
    """A posterior, the rows for its student, and the rows of the comparison.

    Attributes:
        base: makes the base model; None is the recorded one.
        test, other: name of a set -> batches; the test set has labels.
    """

    posterior: Posterior
    base: Callable[[], Any] | None
    rows: list[dict[str, Any]]
    test: list[Batch]
    other: dict[str, list[Batch]]


class Clinc:
    """Posteriors of a classifier of the intents of short queries."""

    def __init__(self, args: Arguments) -> None:
        self.args, self.content = args, json.loads(Path(args.data).read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(str(encoder()))
        self.names = sorted({intent for _, intent in self.content["train"]})

    def base(self) -> Any:
        """Return the encoder with a new head."""
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return AutoModelForSequenceClassification.from_pretrained(str(encoder()), num_labels=len(self.names), **off)

    def rows(self, split: str, count: int, seed: int) -> list[dict[str, Any]]:
        """Return a random selection of rows."""
        order = torch.randperm(len(self.content[split]), generator=torch.Generator().manual_seed(seed))
        chosen = [self.content[split][index] for index in order[:count].tolist()]
        texts = [text for text, _ in chosen]
        encoded = self.tokenizer(texts, truncation=True, padding="max_length", max_length=20)
        pairs = zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
        rows = [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]
        known = [{"labels": self.names.index(intent)} if intent in self.names else {} for _, intent in chosen]
        return [row | label for row, label in zip(rows, known, strict=True)]

    def subject(self, method: Any, learning_rate: float, steps: int) -> Subject:
        """Train a posterior."""
        set_seed(0)
        lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["pooler.dense"])
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=get_peft_model(self.base(), lora),
                method=method,
                args=BayesianTrainingArguments(
                    output_dir=directory, learning_rate=learning_rate, max_steps=steps, per_device_train_batch_size=64,
                    minibatch="shared", trunk_memory_gib=1.0, map_updates=0, use_cpu=True, disable_tqdm=True,
                    report_to="none", logging_strategy="no", save_strategy="no",
                ),
                train_dataset=Dataset.from_list(self.rows("train", self.args.train, seed=0)),
            )  # fmt: skip
            trainer.train()
            posterior = trainer.posterior
        count = self.args.test
        sets = {name: batches(self.rows(name, count, seed=2), 50) for name in ("test", "oos_test")}
        rows = self.rows("train", self.args.rows, seed=1)
        return Subject(posterior, self.base, rows, sets["test"], {"out of scope": sets["oos_test"]})


def windows(args: Arguments, name: str) -> Subject:
    """Return a posterior of the quickstart. Its student sees the first half of the windows of each text."""
    folder = Path(args.quickstart)
    posterior = Posterior.from_pretrained(folder / name)
    tokenizer = load_tokenizer(folder / name, posterior=posterior)
    sets = {text: windows_of(str(folder / f"{text}.txt"), tokenizer, length=128, limit=args.windows)
            for text in ("test", "code")}  # fmt: skip
    ids = {text: torch.tensor(found["input_ids"]) for text, found in sets.items()}
    labels, half = torch.tensor(sets["test"]["labels"]), args.windows // 2
    rows = [{"input_ids": each} for each in ids["test"][:half]]
    halves = zip(ids["test"][half:].split(5), labels[half:].split(5), strict=True)
    test = [{"input_ids": each, "labels": label} for each, label in halves]
    return Subject(posterior, None, rows, test, {"code": [{"input_ids": each} for each in ids["code"][half:].split(5)]})


def subjects(args: Arguments) -> dict[str, Callable[[], Subject]]:
    """Return name -> function that makes a subject."""
    prior = {"lora_": 0.1, "classifier": 1.0}
    chain = SGHMCConfig(
        num_chains=1, draws_per_chain=32, prior_std=prior, warm_start_steps=200, warm_start_learning_rate=3e-3,
        burn_in=0.3,
    )  # fmt: skip
    ensemble = EnsembleConfig(num_chains=8, prior_std=prior)
    return {
        "CLINC150, ensemble of 8": lambda: Clinc(args).subject(ensemble, 3e-3, 400),
        "CLINC150, SGHMC, 32 draws": lambda: Clinc(args).subject(chain, 1e-2, 1200),
        "text, ensemble of 8": lambda: windows(args, "deep-ensemble"),
        "text, SGHMC, 8 draws": lambda: windows(args, "sghmc-one-chain"),
    }


def batches(rows: list[dict[str, Any]], size: int) -> list[Batch]:
    """Return rows as batches."""
    return [default_data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]


@torch.no_grad()
def read(model: Any, found: list[Batch]) -> dict[str, Tensor]:
    """Return total and epistemic uncertainty of all terms, their means in each row, and the NLL if there are labels."""
    parts: dict[str, list[Tensor]] = {"total": [], "epistemic": [], "nll": []}
    for batch in found:
        output = model(**batch)
        for name in ("total", "epistemic"):
            parts[name].append(getattr(output, name).reshape(len(batch["input_ids"]), -1).double())
        if "labels" in batch:
            parts["nll"].append(output.loss.double()[None])
    joined = {name: torch.cat(values) for name, values in parts.items() if values}
    return joined | {f"{name}_of_row": joined[name].mean(-1) for name in ("total", "epistemic")}


def scores(model: Any, subject: Subject, teacher: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a way to predict, and its uncertainties by set."""
    sets = {"test": read(model, subject.test)} | {name: read(model, rows) for name, rows in subject.other.items()}
    figures: dict[str, Any] = {"nll": float(sets["test"]["nll"].mean())}
    for name in subject.other:
        for part in ("total", "epistemic"):
            inside, outside = (sets[each][f"{part}_of_row"] for each in ("test", name))
            label = [0] * len(inside) + [1] * len(outside)
            figures[f"{part}_auroc"] = ood_auroc(torch.cat([inside, outside]).numpy(), label)
    if teacher is not None:
        for name, own in sets.items():
            kind = "test" if name == "test" else "other"
            pair = (teacher[name]["epistemic"].flatten(), own["epistemic"].flatten())
            figures[f"correlation_{kind}"] = rank_correlation(*pair)
    return figures, sets


def seconds(models: Mapping[str, Callable[[], Any]], rounds: int = 9) -> dict[str, float]:
    """Return the median processor seconds of calls, in turn, so that all of them see the same disturbances."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, call in models.items():
            begin = time.process_time()
            call()
            found[name].append(time.process_time() - begin)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def run(subject: Subject) -> dict[str, Any]:
    """Distil a subject, and return the figures of members, one network and the student."""
    begin = time.process_time()
    posterior = distil(
        subject.posterior, subject.rows, base_model=subject.base and subject.base(), batch_size=32, progress=False
    )  # fmt: skip
    spent = time.process_time() - begin
    kind = MODELS[posterior.config.task]

    def load(prediction: str) -> Any:
        return kind.from_pretrained(posterior, base_model=subject.base and subject.base(), prediction=prediction)

    members, student = load("members"), load("distilled")
    found, teacher = scores(members, subject, None)
    rows = {"members": found, "student": scores(student, subject, teacher)[0]}
    alone = load("members")
    alone.show(network_of(posterior, posterior.config.student["network"]))
    rows["network"] = scores(alone, subject, None)[0]
    batch = {name: value for name, value in subject.test[0].items() if name != "labels"}
    plain = load("members").detach()
    plain = getattr(plain, "unload", lambda: plain)().eval()  # without the adapter
    calls = {"members": members, "student": student, "network": alone, "plain": plain}

    def caller(model: Any) -> Callable[[], Any]:
        return lambda: torch.no_grad()(model)(**batch)

    times = seconds({name: caller(model) for name, model in calls.items()})
    for name in rows:
        rows[name]["cost"] = times[name] / times["plain"]
    return {"rows": rows, "student": posterior.config.student, "distil_seconds": spent}


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing subjects."""
    record = json.loads(path.read_text()) if path.exists() else {"subjects": {}}
    record.pop("seconds", None)
    for name, make in subjects(args).items():
        if name not in record["subjects"]:
            record["subjects"][name] = run(make())
            path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    names = {"members": "members", "student": "student", "network": "its network alone"}
    lines, learnt = [], []
    for name, found in record["subjects"].items():
        for kind, label in names.items():
            row = found["rows"][kind]
            quality = [f"{row['nll']:.3f}", f"{row['total_auroc']:.3f}"]
            one = kind == "network"
            epistemic = "-" if one else f"{row['epistemic_auroc']:.3f}"
            ranks = [f"{row[f'correlation_{at}']:.3f}" if kind == "student" else "-" for at in ("test", "other")]
            lines.append([name, label, *quality, epistemic, *ranks, f"{row['cost']:.2f}"])
        student, report = found["student"], found["student"]["report"]
        divergences = [f"{report[name]:.4f}" for name in ("network_kl", "kl")]
        ratio, spent = f"{report['epistemic_ratio']:.2f}", f"{found['distil_seconds']:.0f}"
        learnt.append([name, student["network"], student["num_terms"], *divergences, ratio, spent])
    ranks = ["EU rank corr., test", "EU rank corr., other"]
    columns = ["posterior", "predicted by", "test NLL", "AUROC, TU", "AUROC, EU", *ranks, "cost"]
    more = ["posterior", "network", "terms", "KL of the network", "KL of the student", "mean EU / members'", "seconds"]
    return {"quality": table(columns, lines), "training": table(more, learnt)}


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
