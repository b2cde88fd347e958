"""Fine-tune a sequence classifier into a posterior, step by step. ``hf-bayes classify`` takes the same steps.

    accelerate launch scripts/run_classification.py --model_name_or_path bert-base-uncased --dataset reviews.csv \
        --output_dir posterior --method sghmc
    python scripts/run_classification.py --model_name_or_path bert-base-uncased --dataset reviews.csv \
        --output_dir posterior --method auto                   # compares methods on held-out rows
    python scripts/run_classification.py run.yaml
    python scripts/run_classification.py --config run.yaml --num_train_epochs 5

A column of classes gives a classifier, and a column of lists of classes gives a multi-label classifier. With
``--noise_std`` a column of numbers gives a regression. ``--pair_column`` names the second text of pairs. Rows are
padded to one length; ``--padding batch`` pads each batch to its own longest row.
"""

from __future__ import annotations

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments
from hf_bayes.cli.classifier import LabelArguments, classifier
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.scripts import begin, end_process_group, train_or_tune


def main() -> None:
    """Parse the arguments, load the data and the model, train, and save."""
    model_args, method_args, data_args, labels, args = parse_arguments(
        ModelArguments, MethodArguments, DataArguments, LabelArguments, BayesianTrainingArguments
    )
    method_args.config()  # a wrong method is refused before the model is loaded
    begin(args)  # the seed, and the level of the log
    # a model with LoRA, encoded rows, a collator
    inputs = classifier(model_args, data_args, labels, args, subspace=method_args.subspace)
    train_or_tune(inputs, args, method_args)  # a BayesianTrainer: train, evaluate, save, push


if __name__ == "__main__":
    main()
    end_process_group()
