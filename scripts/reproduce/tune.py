"""Does ``tune`` choose the method that is best on rows that it has not seen?

    python -m scripts.reproduce.tune --data DATA          # the tasks that docs/results/tune.json lacks

``tune`` gets the rows that train and validate in ``recommend``, all its candidates, and its default budget: ten times
the gradients of a run of that table. The test rows then judge the chosen posterior and those that it was chosen from.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import default_data_collator

from hf_bayes import BayesianModelForSequenceClassification, BayesianTrainingArguments, tune
from hf_bayes.cli.evaluation.case import evaluate
from hf_bayes.metrics.evaluation import evaluation_results, row_means
from hf_bayes.training.tuning.candidates import default_candidates
from hf_bayes.training.tuning.record import TuningTrial
from hf_bayes.training.tuning.trials import trial_folder
from scripts.reproduce.recommend import Arguments as TaskArguments
from scripts.reproduce.recommend import tasks
from scripts.reproduce.recommend_tasks import Task
from scripts.reproduce.report import as_text, continued, paired_difference, table

NAME = "tune"


@dataclass
class Arguments:
    """The part of the page to make."""

    data: str = field(metadata={"help": "Folder with clinc150/data_full.json."})
    tasks: list[str] = field(default_factory=lambda: ["clinc_last", "debian_last"], metadata={"help": "Their names."})


def run(task: Task) -> dict[str, Any]:
    """Tune on a task, and return the trials, and the scores of those of finalists on the test rows."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.process_time()
        with redirect_stdout(StringIO()):
            tuning = tune(
                task.model(0),
                BayesianTrainingArguments(
                    output_dir=directory, max_steps=task.gradients, per_device_train_batch_size=task.batch,
                    per_device_eval_batch_size=100, minibatch="shared", trunk_memory_gib=2, map_updates=0, use_cpu=True,
                    disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
                ),
                train_dataset=task.sets["train"], eval_dataset=task.sets["heldout"],
                data_collator=default_data_collator, candidates=default_candidates,
            )  # fmt: skip
        seconds = time.process_time() - begin
        finalists = [_tested(task, trial, Path(directory)) for trial in tuning.kept]
    return {
        "seconds": round(seconds), "gradients": sum(trial.gradients for part in tuning.rounds for trial in part),
        "chosen": tuning.chosen.name, "chosen_gradients": tuning.chosen.gradients, "sentence": tuning.sentence,
        "first": [_trial(trial) for trial in tuning.rounds[0]], "finalists": finalists,
    }  # fmt: skip


def _trial(trial: TuningTrial) -> dict[str, Any]:
    """Return what the held-out rows say about a trial."""
    told = {"failure": trial.failure} if trial.failure else {"heldout_nll": trial.mean_nll}
    return {"method": trial.name, "gradients": trial.gradients, "cost": trial.cost, **told}


def _tested(task: Task, trial: TuningTrial, directory: Path) -> dict[str, Any]:
    """Return what held-out and test rows say about a trial of a finalist."""
    if trial.failure:
        return _trial(trial)
    folder = trial_folder(directory, trial.name, trial.gradients)
    model = BayesianModelForSequenceClassification.from_pretrained(folder)
    found = evaluate(model, {"test": task.sets["test"]}, task.case, default_data_collator, batch_size=100, hide=True)
    results = evaluation_results(found["test"], {}, task.case.figures)
    return {
        **_trial(trial), "nll": results["nll"], "ece": results["ece"],
        "rows": np.round(1000 * row_means(found["test"]["nll"])).astype(int).tolist(),
    }  # fmt: skip


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing tasks."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
    made = tasks(TaskArguments(data=args.data))
    for name in args.tasks:
        if name not in record["tasks"]:
            record["tasks"][name] = run(made[name]())
            path.write_text(as_text(record))
            print(name, record["tasks"][name]["sentence"], flush=True)
    record["seconds"] = sum(found["seconds"] for found in record["tasks"].values())
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return two tables for each task."""
    made = {}
    for name, found in record["tasks"].items():
        first = [[run["method"], _nats(run, "heldout_nll")] for run in _best_first(found["first"])]
        made[f"{name}_first"] = table(["method", "held-out NLL"], first)
        made[name] = _finalists(found)
    return made


def _best_first(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(runs, key=lambda run: run.get("heldout_nll", math.inf))


def _nats(run: Mapping[str, Any], name: str) -> str:
    return f"{run[name]:.3f}" if name in run else "failed"


def _finalists(found: Mapping[str, Any]) -> str:
    """Return the trials of finalists, best on the held-out rows first; differences of test NLLs are paired by row."""
    is_chosen = (found["chosen"], found["chosen_gradients"])
    (chosen,) = (run for run in found["finalists"] if (run["method"], run["gradients"]) == is_chosen)
    rows = []
    for run in _best_first(found["finalists"]):
        name = f"**{run['method']}** (chosen)" if run is chosen else run["method"]
        scores = [_nats(run, key) for key in ("heldout_nll", "nll", "ece")]
        alone = run is chosen or "failure" in run
        difference = "-" if alone else paired_difference(_row_nats(run), _row_nats(chosen))
        rows.append([name, run["gradients"], *scores, difference, run["cost"]])
    heads = ["method", "gradients", "held-out NLL", "test NLL", "test ECE", "test NLL - chosen's", "passes"]
    return table(heads, rows)


def _row_nats(run: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the NLL of each test row [R] in nats."""
    return np.array(run["rows"]) / 1000


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
