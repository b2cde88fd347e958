"""The evaluation of a regression on texts."""

from __future__ import annotations

from collections.abc import Mapping

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.evaluate_texts import TextArguments, collate_texts, text_sets
from hf_bayes.cli.evaluation import Case, Target, nll_of
from hf_bayes.cli.model_labels import numbers_of
from hf_bayes.metrics.figures import NUMBERS
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.predictives import GaussianNumbers, MemberNumbers
from hf_bayes.models.predictors import Predictive


def number_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file; see ``text_sets``."""
    count = len(target.head["labels"])

    def labels_of(rows: Dataset, file: str) -> list[list[float]]:
        return numbers_of(rows, count, what=file, label_column=args.label_column)

    return text_sets(files, tokenizer, args, labels_of=labels_of, placeholder=[0.0] * count)


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


NUMBER_CASE = Case(
    arguments=TextArguments,
    model_class=BayesianModelForSequenceClassification,
    figures=NUMBERS,
    read=number_sets,
    collate=collate_texts,
    scored=scored_numbers,
    unscored=unscored_numbers,
)
