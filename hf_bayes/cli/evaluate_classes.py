"""The evaluation of a text classifier: statistics of labelled rows, and uncertainties of other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.data import load_rows
from hf_bayes.cli.labels import classes_of, unlabelled_text
from hf_bayes.cli.padding import Padding, padding_collator
from hf_bayes.models.classification import BayesianClassifier


@dataclass
class ClassArguments:
    """The columns and the padding of a classifier's rows."""

    text_column: str = field(default="text", metadata={"help": "Classifiers: column of the text."})
    pair_column: str | None = field(
        default=None, metadata={"help": "Classifiers: column of a second text, if rows are pairs."}
    )
    label_column: str = field(default="label", metadata={"help": "Classifiers: column of the test rows' classes."})
    max_length: int | None = field(
        default=None, metadata={"help": "Classifiers: tokens kept of a text; default: all that fit."}
    )
    padding: Padding = field(
        default="data",
        metadata={"help": "Classifiers: pad every batch to the longest row of the data, or to that of the batch."},
    )


def class_names(head: Mapping[str, Any], what: str) -> list[str]:
    """Return the names of a posterior's classes.

    Args:
        head: ``PosteriorConfig.head``.
        what: the name of the posterior in errors.
    Raises:
        ValueError: if it does not predict one class for each row.
    """
    names, problem = list(map(str, head.get("labels", ()))), head.get("problem_type")
    if len(names) < 2 or problem not in (None, "single_label_classification"):
        raise ValueError(
            f"{what} is a posterior for {problem or 'regression'}, expected one class for each row: accuracy, "
            "calibration and uncertainties in nats are of classes. Its NLL on held-out rows is on its model card"
        )
    return names


def class_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, names: list[str], args: ClassArguments
) -> dict[str, Dataset]:
    """Read and encode the rows of each file. Only the rows of "test" have labels.

    Args:
        files: name -> file.
        names: the names of the model's classes.
    Raises:
        OSError, ValueError: for a file that cannot be read, a missing column, or a label that is no class.
    """
    columns: dict[str, Any] = {"text_column": args.text_column, "pair_column": args.pair_column}
    sets = {}
    for name, file in files.items():
        rows = load_rows(file)
        sets[name] = unlabelled_text(rows, tokenizer, what=file, max_length=args.max_length, **columns)
        if name == "test":
            labels = classes_of(rows, names, what=file, label_column=args.label_column)
            sets[name] = sets[name].add_column("labels", labels)
    return sets


@torch.no_grad()
def evaluate_classes(
    model: BayesianClassifier,
    sets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    padding: Padding,
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return the statistics of each set, each [rows, 1]: of ``evaluate_batch`` where rows have labels.

    Rows without labels have ``confidence`` and the uncertainties.

    Args:
        sets: name -> encoded rows.
        batch_size: rows of a batch.
        padding: as in ``padding_collator``.
    """
    collate = padding_collator(tokenizer, sets.values(), padding=padding)
    found = {}
    for name, rows in sets.items():
        batches = tqdm(DataLoader(rows, batch_size=batch_size, collate_fn=collate), desc=name, leave=False)
        pieces = list(_statistics(model, batches))
        found[name] = {key: torch.cat([piece[key] for piece in pieces])[:, None].numpy() for key in pieces[0]}
    return found


def _statistics(model: BayesianClassifier, batches: Any) -> Iterator[dict[str, Tensor]]:
    for batch in batches:
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        if "labels" in inputs:
            statistics, _ = model.evaluate_batch(inputs)
            statistics.pop("member_log_lik", None)
        else:
            output = model(**inputs)
            statistics = {"confidence": output.logits.max(-1).values.exp()}
            uncertainties = {name: getattr(output, name) for name in ("total", "aleatoric", "epistemic")}
            statistics |= {name: value for name, value in uncertainties.items() if value is not None}
        yield {name: value.cpu().double() for name, value in statistics.items()}
