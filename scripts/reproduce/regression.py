"""Regressions with nothing set: the noise of the labels, the learning rate and the temperature are automatic.

    python -m scripts.reproduce.regression                       # the runs that docs/results/regression.json lacks
    python -m scripts.reproduce.regression --targets length --seeds 1

The texts are the one-line descriptions of Debian packages. The model is a pretrained encoder with LoRA in its last
layer. Two numbers are predicted: the logarithm of the length of the description, of which the model sees the beginning,
and the logarithm of the size of the installed package, of which the description says little. Every method has the same
number of gradients for each chain. Each run has no ``noise_std``, or the root mean square of the residuals of plain
fine-tuning on held-out rows, which is nearly the best value.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, default_data_collator, set_seed

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    EnsembleConfig,
    LaplaceConfig,
    MAPConfig,
    MeanFieldConfig,
)
from hf_bayes.core.config import MethodConfig
from scripts.reproduce.debian_sections import COMPANIONS, EMPTY, index, stanzas
from scripts.reproduce.encoder_table import encoder
from scripts.reproduce.report import as_text, continued, paired_difference, spread, table

NAME = "regression"
TARGETS = {"length": "logarithm of the length of a description", "size": "logarithm of the size of a package"}
SIZES = {"train": 1000, "heldout": 600, "test": 2000}
UPDATES, BATCH, TOKENS = 300, 32, 16
PLAIN = "plain fine-tuning"
METHODS: dict[str, MethodConfig | None] = {
    PLAIN: MAPConfig(),
    "nothing set": None,
    "deep ensemble": EnsembleConfig(num_chains=4),
    "mean-field VI": MeanFieldConfig(num_chains=4, num_draws=1),
    "Laplace, linearised": LaplaceConfig(structure="kronecker", fit_prior="evidence"),
}
GIVEN = ", noise given"
"""The end of a row's name, for runs with ``noise_std``."""
DRAWN = ("nothing set", "mean-field VI")
"""Methods that draw from a posterior, whose width depends on the noise."""


COMPARED = (("nothing set", "deep ensemble"), *((name, name + GIVEN) for name in DRAWN))
"""Pairs of rows with a difference of their own."""


@dataclass
class Arguments:
    """The part of the table to make."""

    targets: list[str] = field(default_factory=lambda: list(TARGETS), metadata={"help": "The numbers to predict."})
    seeds: int = field(default=3, metadata={"help": "Number of seeds."})
    minutes: float = field(default=math.inf, metadata={"help": "No run begins after this time."})


def described() -> dict[str, int]:
    """Return {description: KiB of the installed package}; of equal descriptions the first one counts."""
    found: dict[str, int] = {}
    for fields in stanzas(index()):
        text = " ".join(fields.get("Description", "").split())
        left_out = COMPANIONS.search(fields.get("Package", "")) or EMPTY.search(text) or len(text.split()) < 3
        if "Installed-Size" in fields and not left_out:
            found.setdefault(text, int(fields["Installed-Size"]))
    return found


def rows_of(target: str) -> dict[str, Dataset]:
    """Return encoded rows of each set. Labels have mean 0 and standard deviation 1 in the training rows."""
    rows = sorted(described().items())
    random.Random(0).shuffle(rows)
    labels = [math.log(len(text) if target == "length" else size + 1) for text, size in rows]
    train = labels[: SIZES["train"]]
    mean, std = statistics.fmean(train), statistics.pstdev(train)
    tokenizer, sets, begin = AutoTokenizer.from_pretrained(str(encoder())), {}, 0
    for name, count in SIZES.items():
        end = begin + count
        texts = [text for text, _ in rows[begin:end]]
        encoded = tokenizer(texts, truncation=True, padding="max_length", max_length=TOKENS)
        columns = {key: encoded[key] for key in ("input_ids", "attention_mask")}
        sets[name] = Dataset.from_dict({**columns, "labels": [(y - mean) / std for y in labels[begin:end]]})
        begin = end
    return sets


def model_of(seed: int) -> PeftModel:
    """Return the encoder with a new head for one number, and LoRA in the attention of its last layer."""
    set_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(
        str(encoder()), num_labels=1, problem_type="regression", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    lora = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=[5]
    )
    return get_peft_model(base, lora)


def run(sets: Mapping[str, Dataset], method: MethodConfig | None, seed: int, noise_std: float | None) -> dict[str, Any]:
    """Train, and return the figures of the test rows."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = BayesianTrainer(
            model=model_of(seed),
            method=method,
            args=BayesianTrainingArguments(
                output_dir=directory, seed=seed, max_steps=UPDATES, per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=100, noise_std=noise_std, minibatch="shared", trunk_memory_gib=2,
                map_updates=0, use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no",
                save_strategy="no",
            ),
            train_dataset=sets["train"], eval_dataset=sets["heldout"], data_collator=default_data_collator,
        )  # fmt: skip
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
        heldout = trainer.evaluate()
        metrics = trainer.evaluate(sets["test"], metric_key_prefix="test")
        rows = trainer.outcome.evaluator.last["test"].rows
        config = trainer.posterior.config
        trainer.bayesian.detach()
    return {
        "nll": metrics["test_nll"], "rmse": math.sqrt(metrics["test_mse"]), "coverage_error": metrics["test_ace"],
        "epistemic_std": metrics["test_epistemic_std"], "heldout_rmse": math.sqrt(heldout["eval_mse"]),
        "noise_std": config.head["noise_std"], "noise_std_of_run": config.diagnostics.get("noise_std_of_run"),
        "temperature": config.method.get("temperature"), "seconds": round(seconds),
        "rows": np.round(1000 * rows.nll).astype(int).tolist(),
    }  # fmt: skip


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing runs."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    begin = time.perf_counter()
    done = {(one["target"], one["method"], one["seed"]): one for one in record["runs"]}
    for seed in range(args.seeds):
        for target in args.targets:
            sets = rows_of(target)
            for name in (*METHODS, *(name + GIVEN for name in DRAWN)):
                if (target, name, seed) in done or time.perf_counter() - begin > 60 * args.minutes:
                    continue
                noise = done[target, PLAIN, seed]["heldout_rmse"] if name.endswith(GIVEN) else None
                found = run(sets, METHODS[name.removesuffix(GIVEN)], seed, noise)
                done[target, name, seed] = {"target": target, "method": name, "seed": seed, **found}
                record["runs"].append(done[target, name, seed])
                record["seconds"] = sum(one["seconds"] for one in record["runs"])
                path.write_text(as_text(record))
                print(target, seed, name, {key: value for key, value in found.items() if key != "rows"}, flush=True)
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a table for each target, and one of the differences between two methods."""
    tables = {target: _table([one for one in record["runs"] if one["target"] == target]) for target in TARGETS}
    return {**tables, "differences": _differences(record["runs"])}


def _differences(runs: list[dict[str, Any]]) -> str:
    """Return the differences of NLL, with standard errors that are paired by test row."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for one in runs:
        found.setdefault((one["target"], one["method"]), {})[one["seed"]] = one
    lines = []
    for first, second in COMPARED:
        pairs = [(found.get((target, first), {}), found.get((target, second), {})) for target in TARGETS]
        lines.append([first, second, *(_difference(*pair) for pair in pairs)])
    return table(["NLL of", "minus that of", *TARGETS], lines)


def _difference(first: Mapping[int, dict[str, Any]], second: Mapping[int, dict[str, Any]]) -> str:
    """Return the mean over the seeds that both have; "-" without one."""
    shared = sorted(set(first) & set(second))
    if not shared:
        return "-"
    return paired_difference(*(np.mean([each[seed]["rows"] for seed in shared], 0) / 1000 for each in (first, second)))


def _table(runs: list[dict[str, Any]]) -> str:
    """Return the rows of a target, best first; differences to plain fine-tuning are paired by test row and seed."""
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for one in runs:
        cells.setdefault(one["method"], {})[one["seed"]] = one
    order = sorted(cells, key=lambda name: statistics.fmean(one["nll"] for one in cells[name].values()))
    lines = []
    for name in order:
        seeds = cells[name]
        found = {key: [one[key] for one in seeds.values()] for key in next(iter(seeds.values()))}
        difference = "-" if name == PLAIN else _difference(seeds, cells[PLAIN])
        lines.append([
            name, spread(found["nll"]), difference, spread(found["rmse"]), spread(found["coverage_error"]),
            spread(found["epistemic_std"]), spread(found["noise_std"]), str(len(seeds)),
            f"{statistics.fmean(found['seconds']):.0f}",
        ])  # fmt: skip
    head = ["method", "NLL", "NLL - plain's", "RMSE", "coverage error", "epistemic std", "noise_std", "seeds", "CPU s"]
    return table(head, lines)


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
