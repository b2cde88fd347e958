"""The evaluation of a classifier of texts with several labels for each text."""

from __future__ import annotations

from collections.abc import Mapping

from datasets import Dataset
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.evaluation.case import Case, Target, nll_of
from hf_bayes.cli.evaluation.texts import TextArguments, collate_texts, text_sets
from hf_bayes.cli.model_labels import label_vectors_of
from hf_bayes.metrics.figures import SEVERAL_LABELS
from hf_bayes.models.predictors import Predictive


def label_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file; see ``text_sets``."""
    names = list(map(str, target.head["labels"]))

    def labels_of(rows: Dataset, file: str) -> list[list[float]]:
        return label_vectors_of(rows, names, what=file, label_column=args.label_column)

    return text_sets(
        files, tokenizer, args, text_column=target.text_column, labels_of=labels_of, placeholder=[0.0] * len(names)
    )


def scored_labels(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores and the uncertainties of B rows with C labels.

    The NLL of a row is the sum over its labels of ``label_nll``.

    Returns:
        [B]: ``nll``, ``member_nll`` if there are members, ``correct`` (1 if all labels are right), and the tensors of
        ``unscored_labels``. [B, C]: ``label``, its ``probability``, ``label_nll`` and ``brier``.
    """
    logits, labels = found.logits, labels.to(found.logits)
    probability = logits.sigmoid()
    return {
        **nll_of(found, labels),
        **unscored_labels(found, labels),
        "correct": ((logits > 0) == (labels > 0.5)).all(-1),
        "label": labels,
        "probability": probability,
        "label_nll": binary_cross_entropy_with_logits(logits, labels, reduction="none"),
        "brier": (probability - labels).square(),
    }


def unscored_labels(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the uncertainties [B], and ``confidence``: the largest probability of a set of labels.

    The labels are independent in it, so it is the product of the probabilities of the more probable answers.
    """
    return {"confidence": logsigmoid(found.logits.abs()).sum(-1).exp(), **found.parts}


LABEL_CASE = Case(
    arguments=TextArguments,
    figures=SEVERAL_LABELS,
    read=label_sets,
    collate=collate_texts,
    scored=scored_labels,
    unscored=unscored_labels,
)
