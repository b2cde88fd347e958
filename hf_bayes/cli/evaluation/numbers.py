"""The evaluation of a regression on texts, with normal noise or under a user's likelihood of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.data import load_rows
from hf_bayes.cli.evaluation.case import TEST, Case, Target, nll_of
from hf_bayes.cli.evaluation.texts import TextArguments, collate_texts, text_sets
from hf_bayes.cli.model_labels import numbers_of
from hf_bayes.metrics.figures import NUMBERS, OWN_NUMBERS
from hf_bayes.models.predictives.built_in import GaussianNumbers, MemberNumbers
from hf_bayes.models.predictors import Predictive


def number_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file; see ``text_sets``."""
    count = len(target.head["labels"])

    def labels_of(rows: Dataset, file: str) -> list[list[float]]:
        return numbers_of(rows, count, what=file, label_column=args.label_column)

    return text_sets(
        files, tokenizer, args, text_column=target.text_column, labels_of=labels_of, placeholder=[0.0] * count
    )


def scored_numbers(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores and the deviations of B rows with C numbers.

    Returns:
        [B]: ``nll``, and ``member_nll`` if there are members. [B, C]: ``label``, ``prediction``, ``below`` (the
        predictive probability of numbers below the label), ``predictive_std`` and ``epistemic_std``.
    """
    assert isinstance(found, (MemberNumbers, GaussianNumbers))
    numbers = {"label": labels, "prediction": found.logits, "below": found.below(labels).clamp(0, 1)}
    return {**nll_of(found, labels), **numbers, **found.parts}


def unscored_numbers(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return ``predictive_std`` and ``epistemic_std`` [B, C]."""
    return dict(found.parts)


def own_number_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file; see ``text_sets``.

    The placeholder of a label is the first label of the test set: 0 may be outside of the support.
    """
    count = len(target.head["labels"])
    labels = numbers_of(load_rows(files[TEST]), count, what=files[TEST], label_column=args.label_column)
    return text_sets(
        files,
        tokenizer,
        args,
        text_column=target.text_column,
        labels_of=lambda rows, file: labels,
        placeholder=labels[0],
    )


def scored_own_numbers(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores and the deviations of B rows with D numbers under a user's likelihood.

    Returns:
        [B]: ``nll``, and ``member_nll`` if there are members. [B, D]: ``label``, ``prediction``, ``predictive_std``,
        ``aleatoric_std`` and ``epistemic_std``.
    """
    return {**nll_of(found, labels), "label": labels, "prediction": found.logits, **found.parts}


NUMBER_CASE = Case(
    arguments=TextArguments,
    figures=NUMBERS,
    read=number_sets,
    collate=collate_texts,
    scored=scored_numbers,
    unscored=unscored_numbers,
)

OWN_NUMBER_CASE = replace(NUMBER_CASE, figures=OWN_NUMBERS, read=own_number_sets, scored=scored_own_numbers)
