"""``hf-bayes train``: fine-tune a causal language model into a posterior."""

from __future__ import annotations

from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments
from hf_bayes.cli.command import Command
from hf_bayes.cli.language_model import TrainingWindowArguments, language_model
from hf_bayes.cli.scripts import begin, continuing_training, train_or_tune
from hf_bayes.training.arguments import BayesianTrainingArguments


def train(
    model_args: ModelArguments,
    method_args: MethodArguments,
    data_args: DataArguments,
    windows: TrainingWindowArguments,
    args: BayesianTrainingArguments,
) -> None:
    """Fine-tune a causal language model into a posterior, evaluate it on held-out text and save it."""
    method_args.config()  # a wrong method is refused before the model is loaded
    begin(args)
    train_or_tune(
        language_model(model_args, data_args, windows, args, subspace=method_args.subspace), args, method_args
    )


COMMAND = Command(
    run=train,
    arguments=(ModelArguments, MethodArguments, DataArguments, TrainingWindowArguments, BayesianTrainingArguments),
    example="train --model_name_or_path gpt2 --dataset book.txt --output_dir posterior",
    continuing=continuing_training,
)
