"""The labels of a file by the names of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_bayes.cli.model_labels import classes_of, label_vectors_of, numbers_of, tags_of, words_of


def rows_of(labels: list[Any], feature: Any = None) -> Dataset:
    return Dataset.from_dict({"label": labels}, features=None if feature is None else Features({"label": feature}))


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["odd", "even"], ["even", "odd"]), ([7, -1], ["-1", "7"]), ([True, False], ["False", "True"])],
    ids=["words", "integers", "truth values"],
)
def test_classes_are_found_by_the_names_of_the_model(labels: list[Any], names: list[str]) -> None:
    assert classes_of(rows_of(labels), names, what="test.csv") == [1, 0]


def test_class_labels_are_found_by_name_and_not_by_number() -> None:
    label = ClassLabel(names=["yes", "no"])
    assert classes_of(rows_of([0, 1], label), ["no", "yes"], what="test.parquet") == [1, 0]
    lists = rows_of([[0, 1], [1]], List(label))
    assert label_vectors_of(lists, ["no", "maybe", "yes"], what="test.parquet") == [[1, 0, 1], [1, 0, 0]]
    assert tags_of(lists, ["no", "maybe", "yes"], what="test.parquet") == [[2, 0], [0]]


@pytest.mark.parametrize("label", ["c", None])
def test_a_label_that_is_no_class_of_the_model_is_refused(label: str | None) -> None:
    message = rf"row 2 .* has the label {label!r}, expected one of the 4 classes of the model \(a, b, d, ...\)"
    with pytest.raises(ValueError, match=message):
        classes_of(rows_of(["a", label], Value("string")), ["a", "b", "d", "None"], what="test.csv")


@pytest.mark.parametrize("labels", [[10, 7], [10.0, None]])
def test_names_that_a_table_has_read_as_numbers_are_explained(labels: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"a .csv file reads 007 as 7, .*write the names as texts .*, drop such rows"):
        classes_of(rows_of(labels), ["007", "10"], what="test.csv")


@pytest.mark.parametrize("read", [classes_of, label_vectors_of, tags_of])
def test_an_unknown_class_label_is_not_the_last_class(read: Callable[..., Any]) -> None:
    # datasets writes -1 for an unknown label, as in the test splits of GLUE
    label = ClassLabel(names=["no", "yes"])
    rows = rows_of([0, -1], label) if read is classes_of else rows_of([[0], [1, -1]], List(label))
    with pytest.raises(ValueError, match=r"row 2 .* of test.parquet has the label .*-1"):
        read(rows, ["no", "yes"], what="test.parquet")


def test_a_list_of_labels_becomes_a_vector() -> None:
    found = label_vectors_of(rows_of([["b", "a", "b"], [], ["c"]]), ["a", "b", "c"], what="test.jsonl")
    assert found == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("label", [["a", "z"], None, [None]])
def test_an_unknown_label_in_a_list_is_refused(label: Any) -> None:
    message = r"row 2 .* has the label .*, expected a list out of the 2 labels of the model \(a, b\): drop"
    with pytest.raises(ValueError, match=message):
        label_vectors_of(rows_of([["a"], label], List(Value("string"))), ["a", "b"], what="test.jsonl")


def test_text_is_no_list_of_labels() -> None:
    with pytest.raises(
        ValueError,
        match=r"row 1 .* of test.csv has the label 'ab', expected a list out of the 2 labels",
    ):
        label_vectors_of(rows_of(["ab"]), ["a", "b"], what="test.csv")


def test_tags_are_lists_or_text_with_blanks() -> None:
    for labels in ([["O", "B-PER"], ["O"]], ["O B-PER", "O"]):
        assert tags_of(rows_of(labels), ["B-PER", "O"], what="test.csv") == [[1, 0], [1]]
    with pytest.raises(ValueError, match=r"row 1 .* of test.csv has the label 'X', expected tags out of the 2 classes"):
        tags_of(rows_of(["X"]), ["B-PER", "O"], what="test.csv")
    with pytest.raises(TypeError):
        words_of(3)


def test_numbers_are_read_for_every_output() -> None:
    assert numbers_of(rows_of([1, -2]), 1, what="test.csv") == [[1.0], [-2.0]]
    assert numbers_of(rows_of([[1.0, 2.0]]), 2, what="test.jsonl") == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("label", "count", "expected"),
    [
        (float("nan"), 1, "a finite number"),
        (float("inf"), 1, "a finite number"),
        (None, 1, "a finite number"),
        ("4", 1, "a finite number"),
        ([1.0], 2, "a list of 2 finite numbers"),
    ],
)
def test_a_label_that_is_no_finite_number_is_refused(label: Any, count: int, expected: str) -> None:
    with pytest.raises(
        ValueError, match=rf"row 1 .* of test.csv has the label .*, expected {expected}: drop such rows"
    ):
        numbers_of(rows_of([label]), count, what="test.csv")


def test_a_file_without_labels_is_refused() -> None:
    calls: list[tuple[Any, Any]] = [(classes_of, ["a"]), (label_vectors_of, ["a"]), (tags_of, ["a"]), (numbers_of, 1)]
    for read, names in calls:
        with pytest.raises(ValueError, match=r"test.csv has no column 'tags', only label: name one of them"):
            read(rows_of(["a"]), names, what="test.csv", label_column="tags")
