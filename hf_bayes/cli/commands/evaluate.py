"""``hf-bayes evaluate``: scores, calibration, risk-coverage, and detection of other inputs.

The posterior names its task. For a language model the files are texts, which are cut into windows of equal length: a
.txt file is one text, and the rows of a .csv, .jsonl or .parquet file are joined. For classifiers, regressions and
taggers of texts they are .csv, .jsonl or .parquet files with a row for each text; only the test rows need labels:

    one class for each text      the name of a class
    several labels               a list of names
    a regression                 a number
    a tagger                     the words, and a name of a class for each: lists, or texts with blanks
    a likelihood of classes      the number of a class, from 0
    a likelihood of numbers      a number, or a list of them

The AUROC measures how well an uncertainty separates the rows of another set from the test set. The uncertainty of a
window, or of a tagger's text, is the mean over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from rich.console import Console

from hf_bayes.cli.command import Command
from hf_bayes.cli.data import named_files
from hf_bayes.cli.evaluation.case import TEST, Case, Collate, Found, Target
from hf_bayes.cli.evaluation.case import evaluate as statistics_of
from hf_bayes.cli.evaluation.cases import CASES, case_of, described, head_of, own_arguments
from hf_bayes.cli.evaluation.figure import plot
from hf_bayes.cli.evaluation.table import tables
from hf_bayes.cli.json_text import json_text
from hf_bayes.cli.local_files import matching
from hf_bayes.cli.output_file import write_figure, write_file
from hf_bayes.cli.padding import give_length, give_padding
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.posterior_arguments import PosteriorArguments
from hf_bayes.metrics import evaluation_results
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.input_check import context_of
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.posteriors.card_results import POSTERIOR
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import check_folder


@dataclass
class EvaluationArguments(PosteriorArguments):
    """The posterior to evaluate and the files."""

    _argument_group_name = "evaluation"

    test: str = field(kw_only=True, metadata={"help": "Held-out data in distribution, one file."})
    ood: list[str] = field(default_factory=list, metadata={"help": "Other data, as name=file."})
    text_column: str = field(
        default="text", metadata={"help": "Column of the text, or of the words of a tagger, in a file of rows."}
    )
    output_dir: str = field(default="evaluation", metadata={"help": "Directory of results.json and the figure."})
    batch_size: int = field(default=8, metadata={"help": "Windows or rows of a batch."})

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, "windows or rows")


def evaluate(args: EvaluationArguments, *own: Any) -> dict[str, Any]:
    """Measure the scores and the calibration of a posterior, and how well it recognises other inputs.

    Tables are printed, and the results are written with a figure to results.json and uncertainty.png.

    Args:
        args: the posterior and the files.
        own: the arguments of every task.
    Raises:
        ValueError, OSError: for files, columns or labels that do not fit the posterior.
    """
    files = named_files(args.test, args.ood)
    for file in files.values():
        matching(file)  # a missing file is found before the model is loaded
    check_folder(args.output_dir)
    posterior = Posterior.from_pretrained(args.posterior)
    config, load = posterior.config, partial(MODELS[posterior.config.task].from_pretrained, posterior, **args.loading)
    model = None if config.head else load()  # adapters that were trained elsewhere: their base model has the labels
    config = config if model is None else described(config, model)
    case = case_of(config, args.posterior)
    chosen = own_arguments(case, own, args.posterior)
    tokenizer = load_tokenizer(args.posterior, posterior=posterior, base_model=args.base_model)
    model = load() if model is None else model
    give_padding(tokenizer, model.core.config)
    longest, has_table = context_of(model.core)
    give_length(tokenizer, longest, has_table=has_table)
    target = Target(head_of(config, args.posterior), longest, args.text_column)
    sets = case.read(files, tokenizer, target, chosen)
    collate = case.collate(tokenizer, sets, chosen)
    model.to(PartialState().device)  # the device that training would use
    model.count_rows_once()  # the files of an evaluation have no weights
    found, results = measure(model, sets, case, collate, batch_size=args.batch_size)
    write(found, results, case, Path(args.output_dir))
    console = Console(width=100)
    for table in tables(results, args.posterior):
        console.print(table)
    return results


def measure(
    model: BayesianModel,
    sets: Mapping[str, Dataset],
    case: Case,
    collate: Collate,
    *,
    batch_size: int = 8,
    hide: bool = False,
) -> tuple[Found, dict[str, Any]]:
    """Return the statistics of each set of encoded rows, "test" among them, and the results of ``evaluate``."""
    found = statistics_of(model, sets, case, collate, batch_size=batch_size, hide=hide)
    others = {name: statistics for name, statistics in found.items() if name != TEST}
    about = {"task": model.task, "members": model.num_members, "temperature": model.mixture_temperature}
    about |= {POSTERIOR: None if model.posterior is None else model.posterior.fingerprint}
    return found, {**about, **evaluation_results(found[TEST], others, case.figures)}


def write(found: Found, results: Mapping[str, Any], case: Case, directory: Path) -> None:
    """Write the results with a figure to results.json and uncertainty.png of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "results.json", json_text(results, indent=2), flag="--output_dir")
    write_figure(directory / "uncertainty.png", plot(found, results, case.figures), flag="--output_dir", dpi=150)


COMMAND = Command(
    run=evaluate,
    arguments=(EvaluationArguments, *dict.fromkeys(case.arguments for case in CASES.values())),
    example="evaluate posterior --test test.csv --label_column intent --ood out_of_scope=other.csv",
    first="posterior",
)
