"""Evaluate the uncertainty of a posterior: accuracy, NLL, calibration, risk-coverage, and detection of other inputs.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt
    python scripts/evaluate_uncertainty.py --posterior out --test test.csv --label_column intent \
        --ood out_of_scope=other.csv

The posterior names its task. For a language model the files are texts, which are cut into windows of equal length. For
a text classifier they are .csv, .jsonl or .parquet files with a row for each text; only the test rows need labels.

The AUROC measures how well the total (TU) or epistemic (EU) uncertainty of rows separates another set from the test
set. The uncertainty of a window is the mean over its tokens. The script writes results.json and uncertainty.png.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from hf_bayes import BayesianModelForCausalLM, BayesianModelForSequenceClassification, Posterior
from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.data import named_files
from hf_bayes.cli.evaluate_classes import ClassArguments, class_names, class_sets, evaluate_classes
from hf_bayes.cli.evaluate_windows import WindowArguments, evaluate_windows, windows_of
from hf_bayes.cli.evaluation_figure import plot
from hf_bayes.cli.evaluation_table import tables
from hf_bayes.metrics import evaluation_results
from hf_bayes.models.loading import load_tokenizer

Found = dict[str, dict[str, np.ndarray]]
"""The name of a set -> its statistics, each [rows, terms of a row]."""


@dataclass
class Arguments:
    """The posterior to evaluate and the files."""

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    test: str = field(metadata={"help": "Held-out data in distribution, one file."})
    ood: list[str] = field(default_factory=list, metadata={"help": "Other data, as name=file."})
    output_dir: str = field(default="evaluation", metadata={"help": "Directory of results.json and the figure."})
    base_model: str | None = field(default=None, metadata={"help": "Folder or id of the base model, if it has moved."})
    members: int | None = field(default=None, metadata={"help": "Number of members. Default: all."})
    predict: str | None = field(
        default=None, metadata={"help": "members, linearised, distilled ... (see from_pretrained). Default: as stored."}
    )
    calibrated: bool = field(default=True, metadata={"help": "Apply the temperature stored with the posterior."})
    batch_size: int = field(default=8, metadata={"help": "Windows or rows of a batch."})

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of ``from_pretrained``."""
        return {
            "members": self.members, "base_model": self.base_model, "prediction": self.predict,
            "calibrated": self.calibrated,
        }  # fmt: skip

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch_size must be at least 1, got {self.batch_size}: it counts windows or rows")


def language_model(
    posterior: Posterior, tokenizer: PreTrainedTokenizerBase, files: dict[str, str], args: Arguments, own: Any
) -> tuple[BayesianModelForCausalLM, Found]:
    """Return the model, and the statistics of the tokens in windows of texts."""
    sets = {name: windows_of(file, tokenizer, length=own.length, limit=own.max_windows) for name, file in files.items()}
    model = BayesianModelForCausalLM.from_pretrained(posterior, **args.loading)
    model.to(PartialState().device)  # the device that training would use
    return model, evaluate_windows(model, sets, batch_size=args.batch_size)


def text_classifier(
    posterior: Posterior, tokenizer: PreTrainedTokenizerBase, files: dict[str, str], args: Arguments, own: Any
) -> tuple[BayesianModelForSequenceClassification, Found]:
    """Return the model, and the statistics of the texts."""
    sets = class_sets(files, tokenizer, class_names(posterior.config.head, args.posterior), own)
    model = BayesianModelForSequenceClassification.from_pretrained(posterior, **args.loading)
    model.to(PartialState().device)
    return model, evaluate_classes(model, sets, tokenizer, batch_size=args.batch_size, padding=own.padding)


TASKS = {
    "causal_lm": (language_model, WindowArguments),
    "sequence_classification": (text_classifier, ClassArguments),
}
"""The task of a posterior -> the function that evaluates it, and the type of its own arguments."""


def arguments_of(task: str, given: list[object], what: str) -> object:
    """Return the arguments of a task.

    Raises:
        ValueError: for a task without an evaluation, and for arguments of another task.
    """
    if task not in TASKS:
        raise ValueError(f"{what} is a posterior for {task}, expected {' or '.join(TASKS)}: use hf_bayes.metrics")
    _, kind = TASKS[task]
    for other in given:
        changed = [f"--{each.name}" for each in dataclasses.fields(other) if getattr(other, each.name) != each.default]
        if changed and not isinstance(other, kind):
            raise ValueError(f"{', '.join(changed)}: not for {what}, a posterior for {task}: leave it out")
    return next(each for each in given if isinstance(each, kind))


def main() -> None:
    """Load the posterior, score the sets, and write the tables and the figure."""
    args, *own = parse_arguments(Arguments, WindowArguments, ClassArguments)
    files = named_files(args.test, args.ood)
    posterior = Posterior.from_pretrained(args.posterior)
    task = posterior.config.task
    chosen = arguments_of(task, own, args.posterior)
    evaluate, _ = TASKS[task]
    tokenizer = load_tokenizer(args.posterior, posterior=posterior, base_model=args.base_model)
    model, found = evaluate(posterior, tokenizer, files, args, chosen)
    others = {name: statistics for name, statistics in found.items() if name != "test"}
    summary = evaluation_results(found["test"], others, next_tokens=task == "causal_lm")
    results = {"task": task, "members": model.num_members, "temperature": model.mixture_temperature, **summary}
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=2))
    plot(found, results).savefig(directory / "uncertainty.png", dpi=150)
    console = Console(width=100)
    for table in tables(results, args.posterior):
        console.print(table)


if __name__ == "__main__":
    main()
