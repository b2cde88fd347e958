"""``hf-bayes tune``: compare methods on held-out rows within a budget, and save the best posterior."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hf_bayes.cli.arguments import BUDGET_HELP, SUBSPACE_HELP, DataArguments, ModelArguments
from hf_bayes.cli.classifier import LabelArguments, classifier
from hf_bayes.cli.command import Command
from hf_bayes.cli.evaluation.cases import refuse_changes
from hf_bayes.cli.language_model import TrainingWindowArguments, language_model
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.scripts import begin, continuing_comparison
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.tuning.arguments import UNUSED
from hf_bayes.training.tuning.tune import Tuning
from hf_bayes.training.tuning.tune import tune as compare


@dataclass
class TuningArguments:
    """The task and the budget of a comparison."""

    _argument_group_name = "comparison"

    task: Literal["lm", "classify"] = field(
        metadata={"help": "A language model as in hf-bayes train, or hf-bayes classify."}
    )
    budget: int | None = field(default=None, metadata={"help": BUDGET_HELP})
    subspace: str = field(default="trainable", metadata={"help": SUBSPACE_HELP})

    def __post_init__(self) -> None:
        check_count("budget", self.budget, "minibatch gradients")


def tune(
    model_args: ModelArguments,
    tuning: TuningArguments,
    data_args: DataArguments,
    windows: TrainingWindowArguments,
    labels: LabelArguments,
    args: BayesianTrainingArguments,
) -> Tuning:
    """Compare methods on held-out rows within a budget, and save the best posterior with a table and a figure.

    The same command continues a comparison that was interrupted.

    Raises:
        ValueError: for arguments of the other task, without held-out rows, and as ``hf_bayes.tune``.
    """
    refuse_changes(labels if tuning.task == "lm" else windows, f"--task {tuning.task}")
    begin(args)
    if tuning.task == "lm":
        inputs = language_model(model_args, data_args, windows, args, subspace=tuning.subspace)
    else:
        inputs = classifier(model_args, data_args, labels, args, subspace=tuning.subspace)
    if inputs.eval_dataset is None:
        raise ValueError(
            "methods are compared on held-out rows, and --validation_fraction 0 holds none out: give a share of the "
            "rows, or a --validation_file"
        )
    return compare(args=args, budget=tuning.budget, subspace=tuning.subspace, **inputs._asdict())


COMMAND = Command(
    run=tune,
    arguments=(
        ModelArguments, TuningArguments, DataArguments, TrainingWindowArguments, LabelArguments,
        BayesianTrainingArguments,
    ),
    example="tune --task classify --model_name_or_path bert-base-uncased --dataset reviews.csv --output_dir tuned",
    continuing=continuing_comparison,
    unused=UNUSED,
)  # fmt: skip
