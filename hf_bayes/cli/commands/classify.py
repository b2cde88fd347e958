"""``hf-bayes classify``: fine-tune a classifier or a regression of texts into a posterior."""

from __future__ import annotations

from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments
from hf_bayes.cli.classifier import LabelArguments, classifier
from hf_bayes.cli.command import Command
from hf_bayes.cli.scripts import begin, continuing_training, train_or_tune
from hf_bayes.training.arguments import BayesianTrainingArguments


def classify(
    model_args: ModelArguments,
    method_args: MethodArguments,
    data_args: DataArguments,
    labels: LabelArguments,
    args: BayesianTrainingArguments,
) -> None:
    """Fine-tune a classifier or a regression of texts into a posterior, evaluate it on held-out rows and save it."""
    method_args.config()  # a wrong method is refused before the model is loaded
    begin(args)
    train_or_tune(classifier(model_args, data_args, labels, args, subspace=method_args.subspace), args, method_args)


COMMAND = Command(
    run=classify,
    arguments=(ModelArguments, MethodArguments, DataArguments, LabelArguments, BayesianTrainingArguments),
    example="classify --model_name_or_path bert-base-uncased --dataset reviews.csv --output_dir posterior",
    continuing=continuing_training,
)
