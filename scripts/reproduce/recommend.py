"""A table that says which method suits which task: the candidates of ``tune``, at equal numbers of gradients.

    python -m scripts.reproduce.recommend --data DATA          # the runs that docs/results/recommend.json lacks
    python -m scripts.reproduce.recommend --data DATA --tasks clinc --seeds 1 --minutes 60

The pretrained encoder has LoRA in the attention of all its layers, or of the last one, where runs are five times as
fast. No setting is chosen by hand: learning rates, step
sizes and priors are automatic, and every method has a temperature of its mixture, fitted on validation rows. Four
chains have the same number of updates each. Plain fine-tuning has one chain, so it has a quarter of the gradients.
Every finished run is kept, and a later call makes the missing ones.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, default_data_collator, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, attach
from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.evaluate_classes import CLASS_CASE
from hf_bayes.cli.evaluation import evaluate
from hf_bayes.diagnostics.comparison import RowScores, difference_std_error
from hf_bayes.metrics.evaluation import evaluation_results
from hf_bayes.training.tuning.candidates import PLAIN, Candidate, default_candidates
from scripts.reproduce.debian_sections import KNOWN, index, rows_of, splits
from scripts.reproduce.encoder_table import encoder
from scripts.reproduce.report import RESULTS, keep, spread, table

NAME = "recommend"
TOKENS, RANK, BATCH, CHAINS, UPDATES = 16, 8, 32, 4, 300
Rows = list[tuple[str, int]]


class Task(NamedTuple):
    """The rows of a task: ``train``, ``heldout``, ``test`` with labels, and other inputs by name.

    Attributes:
        layers: the layers of the encoder with LoRA; None means all.
    """

    num_classes: int
    rows: dict[str, Rows]
    others: dict[str, list[str]]
    layers: list[int] | None = None


@dataclass
class Arguments:
    """The part of the table to make."""

    data: str = field(metadata={"help": "Folder with clinc150/data_full.json and tinyshakespeare/input.txt."})
    tasks: list[str] = field(default_factory=lambda: list(TASKS), metadata={"help": "Names of tasks."})
    seeds: int = field(default=3, metadata={"help": "Number of seeds."})
    minutes: float = field(default=math.inf, metadata={"help": "No run begins after this time."})
    methods: list[str] = field(default_factory=list, metadata={"help": "Rows of the table. Default: all."})


def clinc(data: Path) -> Task:
    """Return CLINC150 (Larson et al. 2019) with ten training rows an intent. Others: its out-of-scope queries."""
    content = json.loads((data / "clinc150" / "data_full.json").read_text())
    intents = sorted({intent for _, intent in content["train"]})
    numbers = {intent: number for number, intent in enumerate(intents)}

    def take(split: str, count: int) -> Rows:
        found: dict[str, Rows] = {intent: [] for intent in intents}
        for text, intent in content[split]:
            if len(found[intent]) < count:
                found[intent].append((text, numbers[intent]))
        rows = [row for part in found.values() for row in part]
        random.Random(0).shuffle(rows)
        return rows

    rows = {"train": take("train", 10), "heldout": take("val", 4), "test": take("test", 7)}
    return Task(len(intents), rows, {"out of scope": [text for text, _ in content["oos_test"]], **verses(data)})


def debian(data: Path) -> Task:
    """Return descriptions of Debian packages with eight sections. Others: the descriptions of eight more sections."""
    parts = splits(rows_of(index()), {"train": 1000, "heldout": 600, "test": 1000, "ood": 1000})
    rows = {
        name: [(row.text, KNOWN.index(row.section)) for row in parts[name]] for name in ("train", "heldout", "test")
    }
    return Task(len(KNOWN), rows, {"other sections": [row.text for row in parts["ood"]], **verses(data)})


def verses(data: Path) -> dict[str, list[str]]:
    """Return lines of Shakespeare, which no task knows."""
    lines = (data / "tinyshakespeare" / "input.txt").read_text().splitlines()
    return {"Shakespeare": [line for line in lines if len(line) > 30][::40][:500]}


def of_last_layer(task: Callable[[Path], Task]) -> Callable[[Path], Task]:
    """Return the task with LoRA in the last of the encoder's six layers."""
    return lambda data: task(data)._replace(layers=[5])


TASKS: dict[str, Callable[[Path], Task]] = {
    "clinc": clinc, "clinc_last": of_last_layer(clinc), "debian_last": of_last_layer(debian), "debian": debian,
}  # fmt: skip


class Bench:
    """The encoder, the rows of a task, and a run of a candidate on them."""

    def __init__(self, task: Task) -> None:
        self.task, self.path = task, str(encoder())
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        labelled = {name: self._encoded([text for text, _ in rows]) for name, rows in task.rows.items()}
        self.sets = {
            name: rows.add_column("labels", [label for _, label in task.rows[name]]) for name, rows in labelled.items()
        }
        self.others = {
            name: self._encoded(texts).add_column("labels", [0] * len(texts)) for name, texts in task.others.items()
        }  # placeholders, which are not scored

    def _encoded(self, texts: list[str]) -> Dataset:
        found = self.tokenizer(texts, truncation=True, padding="max_length", max_length=TOKENS)
        return Dataset.from_dict({name: found[name] for name in ("input_ids", "attention_mask")})

    def model(self, seed: int) -> PeftModel:
        """Return the encoder with a new classifier and LoRA in the attention of the task's layers."""
        set_seed(seed)
        base = AutoModelForSequenceClassification.from_pretrained(
            self.path, num_labels=self.task.num_classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        where = {"target_modules": ["query", "value"], "layers_to_transform": self.task.layers}
        lora = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, **where)
        return get_peft_model(base, lora)

    def candidates(self) -> Sequence[Candidate]:
        """Return the rows of the table."""
        with attach(self.model(0)) as bayesian:
            return default_candidates(bayesian, num_chains=CHAINS)

    def run(self, candidate: Candidate, seed: int) -> dict[str, Any]:
        """Train, and return the figures of the test rows."""
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = BayesianTrainer(
                model=self.model(seed),
                method=candidate.method,
                args=BayesianTrainingArguments(
                    output_dir=directory, seed=seed, learning_rate=candidate.learning_rate, max_steps=UPDATES,
                    per_device_train_batch_size=BATCH, per_device_eval_batch_size=100, minibatch="shared",
                    trunk_memory_gib=2, map_updates=0, use_cpu=True, disable_tqdm=True, report_to="none",
                    logging_strategy="no", save_strategy="no",
                ),
                train_dataset=self.sets["train"], eval_dataset=self.sets["heldout"],
                data_collator=default_data_collator,
            )  # fmt: skip
            begin = time.process_time()
            trainer.train()
            seconds = time.process_time() - begin
            sets = {"test": self.sets["test"], **self.others}
            found = evaluate(trainer.bayesian, sets, CLASS_CASE, default_data_collator, batch_size=100)
            calibration = trainer.posterior.config.calibration
            trainer.bayesian.detach()
        test = found.pop("test")
        results = evaluation_results(test, found)
        kept = {name: results[name] for name in ("accuracy", "nll", "ece", "brier", "aurc", "auroc")}
        rates = {
            "learning_rate": trainer.active.settings.learning_rate if trainer.active else None,
            "warm_start": trainer.method.warm_start_learning_rate,
        }
        return {
            **kept, **{name: results[name] for name in ("total", "epistemic", "member_nll") if name in results},
            "seconds": round(seconds), "gradients": UPDATES * candidate.method.num_chains, "cost": candidate.cost,
            "temperature": calibration.get("temperature", 1.0),
            "heldout_nll": calibration.get("calibrated_nll"), "heldout_plain_nll": calibration.get("nll"), **rates,
            "rows": np.round(1000 * test["nll"][:, 0]).astype(int).tolist(),
        }  # fmt: skip


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing runs."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    begin = time.perf_counter()
    benches: dict[str, Bench] = {}
    done = {(run["task"], run["method"], run["seed"]) for run in record["runs"]}
    for seed in range(args.seeds):
        for name in args.tasks:
            benches[name] = benches.get(name) or Bench(TASKS[name](Path(args.data)))
            for candidate in benches[name].candidates():
                late = time.perf_counter() - begin > 60 * args.minutes
                left_out = args.methods and candidate.name not in args.methods
                if late or left_out or (name, candidate.name, seed) in done:
                    continue
                try:
                    found = benches[name].run(candidate, seed)
                except (ValueError, FloatingPointError) as error:
                    found = {"failure": str(error)}
                record["runs"].append({"task": name, "method": candidate.name, "seed": seed, **found})
                path.write_text(json.dumps(record) + "\n")
                print(name, seed, candidate.name, {k: v for k, v in found.items() if k != "rows"}, flush=True)
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a table for each task that has runs."""
    tasks = dict.fromkeys(run["task"] for run in record["runs"])
    return {task: _table([run for run in record["runs"] if run["task"] == task]) for task in tasks}


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a task, best first; differences to plain fine-tuning are paired by test row and seed."""
    cells: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        cells.setdefault(run["method"], {})[run["seed"]] = run
    finished = {name: seeds for name, seeds in cells.items() if not any("failure" in run for run in seeds.values())}
    plain = [name for name in finished if name.startswith(PLAIN)]
    rival = min(plain, key=lambda name: _mean(finished[name], "nll")) if plain else None
    rows = []
    for name, seeds in sorted(finished.items(), key=lambda item: _mean(item[1], "nll")):
        difference = "-" if rival in (None, name) else _difference(seeds, finished[rival])
        shifts = next(iter(seeds.values()))["auroc"]
        rows.append([
            name, _spread(seeds, "accuracy"), _spread(seeds, "nll"), difference, _spread(seeds, "ece"),
            *(_detection(seeds, shift, by) for shift in shifts for by in ("total", "epistemic")),
            _spread(seeds, "temperature", 2), len(seeds), round(_mean(seeds, "seconds")),
        ])  # fmt: skip
    shifts = list(next(iter(finished[name].values()))["auroc"]) if (name := next(iter(finished), "")) else []
    heads = [f"{shift}, {by}" for shift in shifts for by in ("TU", "EU")]
    columns = ["method", "accuracy", "NLL", "NLL - plain's", "ECE", *heads, "t", "seeds", "CPU s"]
    return table(columns, rows)


def _detection(seeds: Mapping[int, Mapping[str, Any]], shift: str, by: str) -> str:
    found = [run["auroc"][shift].get(by) for run in seeds.values()]
    return "-" if None in found else spread(found)  # one member has no epistemic uncertainty


def _difference(seeds: Mapping[int, Mapping[str, Any]], plain: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the mean difference of NLL over the seeds that both have, with its standard error over test rows."""
    both = sorted(set(seeds) & set(plain))
    if not both:
        return "-"
    ours, theirs = (np.mean([part[seed]["rows"] for seed in both], 0) / 1000 for part in (seeds, plain))
    ones = np.ones(len(ours), dtype=np.int64)
    error = difference_std_error(RowScores(ours, ones), RowScores(theirs, ones))
    return f"{ours.mean() - theirs.mean():+.3f} ± {math.nan if error is None else error:.3f}"


def _mean(seeds: Mapping[int, Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in seeds.values())


def _spread(seeds: Mapping[int, Mapping[str, Any]], name: str, digits: int = 3) -> str:
    return spread([run[name] for run in seeds.values()], digits)


def main() -> None:
    """Make the missing runs and the page."""
    (args,) = parse_arguments(Arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep(NAME, lambda: experiment(args, RESULTS / f"{NAME}.json"))


if __name__ == "__main__":
    main()
