"""Evaluate the uncertainty of a posterior: scores, calibration, risk-coverage, and detection of other inputs.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt
    python scripts/evaluate_uncertainty.py --posterior out --test test.csv --label_column intent \
        --ood out_of_scope=other.csv
    python scripts/evaluate_uncertainty.py --posterior tagger --test test.jsonl --text_column tokens \
        --label_column tags --ood tweets=tweets.jsonl

The posterior names its task. For a language model the files are texts, which are cut into windows of equal length. For
classifiers, regressions and taggers of texts they are .csv, .jsonl or .parquet files with a row for each text; only the
test rows need labels:

    one class for each text      the name of a class
    several labels               a list of names
    a regression                 a number
    a tagger                     the words, and a name of a class for each: lists, or texts with blanks

The AUROC measures how well an uncertainty separates the rows of another set from the test set. The uncertainty of a
window, or of a tagger's text, is the mean over its tokens. The script writes results.json and uncertainty.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from hf_bayes import Posterior
from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.data import named_files
from hf_bayes.cli.evaluation import TEST, evaluate
from hf_bayes.cli.evaluation_cases import CASES, case_of, own_arguments
from hf_bayes.cli.evaluation_figure import plot
from hf_bayes.cli.evaluation_table import tables
from hf_bayes.metrics import evaluation_results
from hf_bayes.models.loading import load_tokenizer


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


def main() -> None:
    """Load the posterior, score the sets, and write the tables and the figure."""
    args, *own = parse_arguments(Arguments, *dict.fromkeys(case.arguments for case in CASES.values()))
    files = named_files(args.test, args.ood)
    posterior = Posterior.from_pretrained(args.posterior)
    case = case_of(posterior.config, args.posterior)
    chosen = own_arguments(case, own, args.posterior)
    tokenizer = load_tokenizer(args.posterior, posterior=posterior, base_model=args.base_model)
    sets = case.read(files, tokenizer, posterior.config.head, chosen)
    collate = case.collate(tokenizer, sets, chosen)
    model = case.model_class.from_pretrained(posterior, **args.loading)
    model.to(PartialState().device)  # the device that training would use
    found = evaluate(model, sets, case, collate, batch_size=args.batch_size)
    others = {name: statistics for name, statistics in found.items() if name != TEST}
    results = {
        "task": posterior.config.task,
        "members": model.num_members,
        "temperature": model.mixture_temperature,
        **evaluation_results(found[TEST], others, case.figures),
    }
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=2))
    plot(found, results, case.figures).savefig(directory / "uncertainty.png", dpi=150)
    console = Console(width=100)
    for table in tables(results, args.posterior):
        console.print(table)


if __name__ == "__main__":
    main()
