"""The evaluation of a tagger: a class for each word of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerBase

from hf_bayes.cli.data import check_split, load_rows
from hf_bayes.cli.evaluation.case import TEST, Case, Collate, Target
from hf_bayes.cli.evaluation.classes import scored_classes, unscored_classes
from hf_bayes.cli.evaluation.texts import TextArguments
from hf_bayes.cli.labels import check_columns
from hf_bayes.cli.model_labels import tags_of, words_of
from hf_bayes.cli.padding import longest_row
from hf_bayes.cli.row_places import if_filled, place_of
from hf_bayes.metrics.figures import TAGS
from hf_bayes.models.predictors import Predictive
from hf_bayes.posteriors.storage.json_types import is_texts
from hf_bayes.uncertainty.likelihoods import IGNORE


def word_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: TextArguments
) -> dict[str, Dataset]:
    """Read and encode the words of each file. Only the rows of the test set need tags.

    Raises:
        OSError, ValueError: for a file that cannot be read, a missing column, one column with two uses, a row without
            words, tags that are not classes of the model or not as many as words, and a tokenizer that cannot be given
            words.
    """
    if args.pair_column is not None:
        raise ValueError(f"--pair_column {args.pair_column}: a tagger reads one text, leave it out")
    check_columns(target.text_column, None, args.label_column)
    if not tokenizer.is_fast:
        raise ValueError(
            f"a tagger needs a fast tokenizer, which finds the tokens of each word, got {type(tokenizer).__name__}: "
            "save one with the posterior"
        )
    names, sets = list(map(str, target.head["labels"])), {}
    for name, file in files.items():
        rows = load_rows(file)
        words = _words(rows, target.text_column, file)
        tags = [[0] * len(row) for row in words]
        if name == TEST:
            tags = tags_of(rows, names, what=file, label_column=args.label_column)
        sets[name] = _encoded(words, tags, tokenizer, what=file, max_length=args.max_length)
    return sets


def collate_words(tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Dataset], args: TextArguments) -> Collate:
    """Return a collator that pads rows and their labels."""
    if args.padding == "batch":
        return DataCollatorForTokenClassification(tokenizer)
    return DataCollatorForTokenClassification(tokenizer, padding="max_length", max_length=longest_row(sets.values()))


def _words(rows: Dataset, column: str, what: str) -> list[list[str]]:
    """Return the words of each row: a list, or text with blanks between them."""
    check_split(rows, column, what)
    found = []
    for number, value in enumerate(rows[column]):
        words = words_of(value) if isinstance(value, (str, list)) else []
        if not words or not is_texts(words):
            where = place_of(what, number)
            raise ValueError(
                f"{where} has {value!r} in the column {column!r}, expected a list of words, or text: "
                "drop such rows, or name the column of the words" + (if_filled(where) if value is None else "")
            )
        found.append(words)
    return found


def _encoded(
    words: Sequence[list[str]],
    tags: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: str,
    max_length: int | None,
) -> Dataset:
    """Return encoded rows. The first token of a word has its tag, and all other tokens have none."""
    encoded = tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=max_length)
    labels = []
    for number, (row, own) in enumerate(zip(words, tags, strict=True)):
        if len(row) != len(own):
            raise ValueError(
                f"{place_of(what, number)} has {len(row)} words and {len(own)} tags, expected a tag for each word: "
                "name the columns of words and tags"
            )
        before, row_labels = None, []
        for word in encoded.word_ids(number):
            row_labels.append(IGNORE if word is None or word == before else own[word])
            before = word
        if all(label == IGNORE for label in row_labels):
            raise ValueError(f"{place_of(what, number)} {_without_words(row, tokenizer, len(row_labels))}")
        labels.append(row_labels)
    kept = {name: values for name, values in encoded.items() if name != "token_type_ids"}
    return Dataset.from_dict({**kept, "labels": labels})


def _without_words(row: list[str], tokenizer: PreTrainedTokenizerBase, kept: int) -> str:
    """Return why no word of a row is scored, and what to do."""
    if set(tokenizer(row, is_split_into_words=True).word_ids()) <= {None}:
        return "has no word with a token: drop the row"
    return f"has no word left in the {kept} tokens that were kept of it: raise --max_length"


def scored_tags(found: Predictive, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores and the uncertainties of ``scored_classes``, with ``label`` and ``predicted`` [n]."""
    terms = labels != IGNORE
    return {**scored_classes(found, labels), "label": labels[terms], "predicted": found.logits[terms].argmax(-1)}


WORD_CASE = Case(
    arguments=TextArguments,
    figures=TAGS,
    read=word_sets,
    collate=collate_words,
    scored=scored_tags,
    unscored=unscored_classes,
)
