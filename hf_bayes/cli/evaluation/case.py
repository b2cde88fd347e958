"""The evaluation of a posterior on sets of rows, and the record of what differs from task to task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_bayes.metrics.figures import Array, Figures
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictors import Predictive, Reader

TEST = "test"
"""The name of the set in distribution. Only its labels are scored."""

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]
Found = dict[str, dict[str, Array]]
"""The name of a set -> its statistics, each [R, T]: T terms of R rows, NaN where a row has fewer terms."""


class Target(NamedTuple):
    """The model that rows are read for.

    Attributes:
        head: ``PosteriorConfig.head``, with the names of the labels.
        context: tokens of the model's context; None for no limit.
        text_column: the column of the text, or of the words of a tagger, in files of rows.
    """

    head: Mapping[str, Any]
    context: int | None
    text_column: str = "text"


@dataclass(frozen=True, kw_only=True)
class Case:
    """The evaluation of the posteriors of one task and one kind of labels.

    Attributes:
        arguments: the dataclass of the arguments that only some tasks have.
        figures: the figures of the labels.
        read: a function of the files by name, the tokenizer, the model and the arguments. It returns encoded rows of
            each set. Rows without labels have placeholders at the terms of their labels.
        collate: a function of the tokenizer, the sets and the arguments. It returns the collator of the rows.
        scored: from a prediction and labels to the statistics of the test set.
        unscored: from a prediction and placeholders to the uncertainties of another set.
    """

    arguments: type[Any]
    figures: Figures
    read: Callable[[Mapping[str, str], PreTrainedTokenizerBase, Target, Any], dict[str, Dataset]]
    collate: Callable[[PreTrainedTokenizerBase, Mapping[str, Dataset], Any], Collate]
    scored: Reader
    unscored: Reader


@torch.no_grad()
def evaluate(
    model: BayesianModel,
    sets: Mapping[str, Dataset],
    case: Case,
    collate: Collate,
    *,
    batch_size: int,
    hide: bool = False,
) -> Found:
    """Return the statistics of each set.

    Args:
        sets: name -> encoded rows with ``labels``.
        collate: the collator of the rows.
        batch_size: rows of a batch.
        hide: True shows no progress bar.
    Raises:
        ValueError: for predictions that are not finite.
    """
    found = {}
    for name, rows in sets.items():
        read = case.scored if name == TEST else case.unscored
        pieces, counts = [], []
        loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate)
        for batch in tqdm(loader, desc=name, leave=False, disable=hide or None):  # None: only a terminal gets a bar
            inputs = {key: value.to(model.device) for key, value in batch.items()}
            statistics, _ = model.read_predictions(inputs, read)
            pieces.append({key: value.cpu().double() for key, value in statistics.items()})
            counts.append(model.terms_per_row(inputs).cpu())
        joined = {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}
        _refuse_undefined(joined, name)
        found[name] = {key: _by_rows(values, torch.cat(counts)) for key, values in joined.items()}
    return found


def nll_of(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return ``nll`` [n] of the mixture and, if members are averaged, ``member_nll`` [n], the mean over the members."""
    return {name: value for name, value in found.statistics(labels).items() if name in ("nll", "member_nll")}


def _refuse_undefined(statistics: Mapping[str, Tensor], name: str) -> None:
    """Raise a ValueError for numbers that are not finite, except an infinite NLL: a label may have probability 0."""
    for key, values in statistics.items():
        undefined = values.isnan() if key.endswith("nll") else ~values.isfinite()
        if bool(undefined.any()):
            raise ValueError(
                f"{int(undefined.sum())} of {undefined.numel()} values of {key!r} on the set {name!r} are not finite: "
                "the members have diverged, see their diagnostics (hf-bayes diagnose)"
            )


def _by_rows(values: Tensor, counts: Tensor) -> Array:
    """Return [R, T] from [n] values of terms, with NaN after the last term of a row; [R, T] values stay as they are.

    Args:
        counts: [R] the number of terms of each row, n in total.
    """
    if values.ndim == 2:
        return values.numpy()
    table = values.new_full((len(counts), int(counts.max())), torch.nan)
    table[torch.arange(table.shape[1]) < counts[:, None]] = values
    return table.numpy()
