"""Fine-tune a sequence classifier into a posterior.

    accelerate launch scripts/run_classification.py --model_name_or_path bert-base-uncased --dataset reviews.csv \
        --output_dir posterior --method sghmc --method_args '{"num_chains": 8, "prior_std": 0.1}' --learning_rate 1e-2
    python scripts/run_classification.py run.yaml
    python scripts/run_classification.py --config run.yaml --learning_rate 3e-3

A column of classes makes a classifier, one of lists of classes a multi-label classifier, and with ``--noise_std`` a
column of numbers a regression. ``--pair_column`` names the second text of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import TaskType
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainer, BayesianTrainingArguments
from hf_bayes.cli.labels import labelled_text
from hf_bayes.cli.scripts import (
    DataArguments,
    MethodArguments,
    ModelArguments,
    end_process_group,
    parse_arguments,
    train_and_save,
)


@dataclass
class LabelledArguments(DataArguments):
    """Texts and their labels."""

    pair_column: str | None = field(default=None, metadata={"help": "Column of a second text, where rows are pairs."})
    label_column: str = field(
        default="label",
        metadata={"help": "Column of the label: integers or strings, lists of them, or numbers (with --noise_std)."},
    )
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text; the model's own limit."})


def main() -> None:
    """Parse, load, train, save."""
    model_args, method_args, data_args, args = parse_arguments(
        ModelArguments, MethodArguments, LabelledArguments, BayesianTrainingArguments
    )
    logging.set_verbosity(args.get_process_log_level())
    set_seed(args.seed)  # a fresh adapter or head is then the same in every process, and in every run
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
    # decoders read the class off the last token that is not padding: they must know which one that is
    model.config.pad_token_id = tokenizer.pad_token_id
    model = model_args.add_lora(model, TaskType.SEQ_CLS)

    trainer = BayesianTrainer(
        model=model,
        method=method,
        args=args,
        subspace=method_args.subspace,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    train_and_save(trainer)


if __name__ == "__main__":
    main()
    end_process_group()
