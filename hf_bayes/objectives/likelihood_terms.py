"""Counts of likelihood terms: loss tokens after the causal shift, or examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_rows import in_words, require_dataset
from hf_bayes.uncertainty.likelihoods import Likelihood, next_tokens, refuse_labels


class TermCount(NamedTuple):
    """The numbers of likelihood terms of a data set.

    Attributes:
        total: the number of terms in all rows.
        most: the largest number of terms in one row.
    """

    total: int
    most: int


def count_terms(
    dataset: Any,
    collate: Callable[..., Any],
    likelihood: Likelihood,
    *,
    shift: bool,
    num_outputs: int | None = None,
    batch_size: int = 64,
    progress: bool = True,
    name: str = "train_dataset",
    both_halves: bool = False,
    by_row: str | None = None,
    check: Callable[..., None] | None = None,
) -> TermCount:
    """Count the likelihood terms of a data set as collated: loss tokens after the causal shift, or examples.

    Args:
        dataset: a data set with a length, whose rows ``collate`` takes.
        shift: True if the label of a position is the next token.
        num_outputs: the number of the model's outputs, which labels must fit; None does not check labels.
        name: the name of the data set in messages.
        both_halves: True if its even and its odd rows must each have terms.
        by_row: the second half of the message to a user whose collator packs rows: why it must not, and what to do.
            None if it may.
        check: a check of the inputs of a batch, such as a model's ``InputCheck``.
    Raises:
        ValueError: if there is no row, no label, no term at all, a label out of range (naming a row), inputs that
            ``check`` refuses, a row that the collator cannot read, or a collator that packs rows where it must not.
    """
    require_dataset(dataset, name)
    most, parts = 0, torch.zeros(2, dtype=torch.long)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=in_words(collate, name),
    )
    for index, batch in enumerate(tqdm(loader, desc="Counting likelihood terms", disable=not progress, leave=False)):
        labels = labels_of(batch)
        if check is not None:
            check(batch, where=name, first=index * batch_size)
        if num_outputs is not None:
            refuse_labels(likelihood, labels, num_outputs, where=name, first=index * batch_size)
        given = min(batch_size, len(dataset) - index * batch_size)
        if by_row is not None and len(labels) != given:
            raise ValueError(f"the data collator made {len(labels)} rows of {given} of {name}, and {by_row}")
        targets = next_tokens(labels, batch.get("attention_mask")) if shift else labels
        per_row = likelihood.is_term(targets).reshape(len(labels), -1).sum(1)
        most = max(most, int(per_row.max()))
        parts.index_add_(0, (index * batch_size + torch.arange(len(per_row))) % 2, per_row.cpu())
    _require_terms(parts, name, shift=shift, both_halves=both_halves)
    return TermCount(int(parts.sum()), most)


def count_terms_of(
    model: BayesianModel, dataset: Any, collate: Callable[..., Any], *, progress: bool = False, **options: Any
) -> TermCount:
    """Count the likelihood terms that a model finds in a data set, and check that it can take the rows.

    Args:
        model: an attached model, with its likelihood, shift of labels, number of outputs and check of inputs.
        dataset, collate, progress: see ``count_terms``.
        options: further arguments of ``count_terms``, such as ``name``.
    """
    return count_terms(
        dataset,
        collate,
        model.likelihood,
        shift=model.term_kind == "token",
        num_outputs=model.num_outputs,
        progress=progress,
        check=model.check_inputs,
        **options,
    )


def all_ignored(*, shift: bool) -> str:
    """Return in words why data have no likelihood term."""
    return f"all labels are -100{' after the causal shift' if shift else ''}"


def labels_of(batch: Any) -> Tensor:
    """Return the labels of a collated batch.

    Raises:
        ValueError: if it has none.
    """
    if batch.get("labels") is None:
        single = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 1]
        raise ValueError(
            f"the data collator gives no labels (keys {sorted(batch)}): no likelihood without them. For a language "
            "model give DataCollatorForLanguageModeling(tokenizer, mlm=False) as data_collator= (collate= outside a "
            "trainer); otherwise add a column labels. If another column has the labels, give "
            f'data.rename_column("{single[0] if single else "its name"}", "labels")'
        )
    labels: Tensor = batch["labels"]
    return labels


def _require_terms(parts: Tensor, name: str, *, shift: bool, both_halves: bool) -> None:
    """Check that there are terms; ``parts`` [2] are the numbers of terms in even and in odd rows."""
    if not bool(parts.any()):
        raise ValueError(f"no row of {name} has a likelihood term ({all_ignored(shift=shift)}): check labels")
    if both_halves and not bool(parts.all()):
        raise ValueError(
            f"the {'even' if parts[0] == 0 else 'odd'} rows of {name} hold no likelihood term, and one half of them "
            "judges what is fitted on the other half: shuffle them"
        )
