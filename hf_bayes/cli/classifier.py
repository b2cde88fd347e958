"""A sequence classifier, or a regression, and labelled texts to train it on."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from peft import TaskType
from transformers import AutoModelForSequenceClassification

from hf_bayes.cli.arguments import TRAINABLE, DataArguments, ModelArguments
from hf_bayes.cli.labels import encoded_text, text_labels
from hf_bayes.cli.padding import Padding, give_length, padding_collator
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.scripts import ModelAndData
from hf_bayes.core.layout import select
from hf_bayes.models.input_check import context_of
from hf_bayes.models.loading.base_model import core_of
from hf_bayes.models.loading.lora_layers import plain_name
from hf_bayes.training.arguments import BayesianTrainingArguments


@dataclass
class LabelArguments:
    """The columns and the padding of labelled texts."""

    _argument_group_name = "labels of a classifier"

    pair_column: str | None = field(default=None, metadata={"help": "Column of a second text, if rows are pairs."})
    label_column: str = field(
        default="label",
        metadata={"help": "Column of the labels. Classes, lists of classes, or decimal numbers (a regression)."},
    )
    regression: bool = field(
        default=False, metadata={"help": "Labels are numbers to predict, also where they are integers."}
    )
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text. Default: all that fit."})
    padding: Padding = field(
        default="data", metadata={"help": "Pad every batch to the longest row of the data, or to that of the batch."}
    )

    def __post_init__(self) -> None:
        check_count("max_length", self.max_length, "the tokens kept of a text")


def classifier(
    model_args: ModelArguments,
    data_args: DataArguments,
    labels: LabelArguments,
    args: BayesianTrainingArguments,
    *,
    subspace: str = TRAINABLE,
) -> ModelAndData:
    """Load the model with its LoRA and a head for the labels, and encode the texts.

    A column of classes gives a classifier, and a column of lists of classes gives a multi-label classifier. A column of
    decimal numbers gives a regression, and one of integers does so with ``labels.regression`` or ``args.noise_std``.

    Parameters that the checkpoint lacks, such as a head for these labels, are learnt.

    Args:
        subspace: the random parameters, see ``hf_bayes.core.layout.select``.
    Raises:
        ValueError: if ``subspace`` leaves parameters frozen that the checkpoint lacks, and as ``text_labels``,
            ``encoded_text`` and ``DataArguments.load``.
    """
    tokenizer = model_args.load_tokenizer()
    numbers = labels.regression or args.noise_std is not None
    columns: dict[str, Any] = {"text_column": data_args.text_column, "pair_column": labels.pair_column}
    with args.main_process_first(desc="data"):
        loaded = data_args.load(args.seed, label_column=None if numbers else labels.label_column)
        columns["place"] = loaded.place
        known = model_args.class_names()
        found = text_labels(loaded.rows, label_column=labels.label_column, numbers=numbers, known=known, **columns)
    weights = model_args.load_model(AutoModelForSequenceClassification, **found.head)
    model, new, _ = weights
    longest, has_table = context_of(core_of(model))
    cutting = deepcopy(tokenizer)  # the tokenizer that is saved keeps its own limit
    give_length(cutting, longest, has_table=has_table)
    with args.main_process_first(desc="tokens"):
        splits = encoded_text(
            loaded.rows,
            cutting,
            found.labels,
            max_length=labels.max_length,
            longest=longest if has_table else None,
            **columns,
        )
    # decoders classify by the last token that is not padding, so they need the padding token
    model.config.pad_token_id = tokenizer.pad_token_id
    adapted = model_args.add_lora(model, TaskType.SEQ_CLS, new, subspace=subspace)
    learnt = {plain_name(name) for name in select(adapted, subspace).names} if new else set()
    frozen = [name for name in new if name not in learnt]
    model_args.check_weights(weights, frozen, "give another model, or learn them (LoRA does; --subspace all does)")
    collate = padding_collator(tokenizer, splits.values(), padding=labels.padding)
    return ModelAndData(adapted, splits["train"], splits.get("validation"), collate, tokenizer)
