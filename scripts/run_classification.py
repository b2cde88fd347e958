"""Fine-tune a sequence classifier into a posterior.

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

from dataclasses import dataclass, field

from peft import TaskType
from transformers import AutoModelForSequenceClassification, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments, parse_arguments
from hf_bayes.cli.labels import labelled_text
from hf_bayes.cli.padding import Padding, padding_collator
from hf_bayes.cli.scripts import end_process_group, train_or_tune


@dataclass
class LabelledArguments(DataArguments):
    """The arguments of the texts and their labels."""

    pair_column: str | None = field(default=None, metadata={"help": "Column of a second text, if rows are pairs."})
    label_column: str = field(
        default="label",
        metadata={"help": "Column of the labels: integers or strings, lists of them, or numbers (with --noise_std)."},
    )
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text; default: all that fit."})
    padding: Padding = field(
        default="data", metadata={"help": "Pad every batch to the longest row of the data, or to that of the batch."}
    )


def main() -> None:
    """Parse the arguments, load the data and the model, train, and save."""
    model_args, method_args, data_args, args = parse_arguments(
        ModelArguments, MethodArguments, LabelledArguments, BayesianTrainingArguments
    )
    logging.set_verbosity(args.get_process_log_level())
    set_seed(args.seed)  # a new adapter or head is then equal in every process and in every run
    method = method_args.config()

    tokenizer = model_args.load_tokenizer()
    with args.main_process_first(desc="data"):
        splits, head = labelled_text(
            data_args.load(args.seed),
            tokenizer,
            text_column=data_args.text_column,
            pair_column=data_args.pair_column,
            label_column=data_args.label_column,
            numbers=args.noise_std is not None,
            max_length=data_args.max_length,
        )

    model = model_args.load_model(AutoModelForSequenceClassification, **head)
    # decoders classify by the last token that is not padding, so they need the padding token
    model.config.pad_token_id = tokenizer.pad_token_id
    model = model_args.add_lora(model, TaskType.SEQ_CLS)

    given = {
        "train_dataset": splits["train"], "eval_dataset": splits.get("validation"),
        "data_collator": padding_collator(tokenizer, splits.values(), padding=data_args.padding),
        "processing_class": tokenizer, "subspace": method_args.subspace,
    }  # fmt: skip
    train_or_tune(model, args, method, chosen=method_args, **given)


if __name__ == "__main__":
    main()
    end_process_group()
