"""The evaluation of a classifier of texts, with one class for each text."""

from __future__ import annotations

from collections.abc import Mapping

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.evaluation.case import Case, Target
from hf_bayes.cli.evaluation.texts import TextArguments, collate_texts, text_sets
from hf_bayes.cli.model_labels import classes_of
from hf_bayes.metrics.figures import CLASSES
from hf_bayes.models.predictors import Predictive
from hf_bayes.uncertainty.likelihoods import IGNORE


def class_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file; see ``text_sets``."""

    def labels_of(rows: Dataset, file: str) -> list[int]:
        return classes_of(rows, list(map(str, target.head["labels"])), what=file, label_column=args.label_column)

    return text_sets(files, tokenizer, args, text_column=target.text_column, labels_of=labels_of, placeholder=0)


def scored_classes(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores and the uncertainties [n] of the n labels."""
    statistics = found.statistics(labels)
    statistics.pop("member_log_lik", None)
    return statistics


def unscored_classes(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return ``confidence`` and the uncertainties [n] at the n placeholders."""
    terms = labels != IGNORE
    uncertainties = {name: value[terms] for name, value in found.parts.items()}
    return {"confidence": found.logits[terms].amax(-1).exp(), **uncertainties}


CLASS_CASE = Case(
    arguments=TextArguments,
    figures=CLASSES,
    read=class_sets,
    collate=collate_texts,
    scored=scored_classes,
    unscored=unscored_classes,
)
