"""The settings of a head for a column of labels, and the encoded rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from packaging.version import Version
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from hf_bayes.cli.data import load_rows, load_splits
from hf_bayes.cli.labels import encoded_text, labelled_text, text_labels, unlabelled_text
from hf_bayes.cli.model_labels import classes_of

ROWS = [{"text": f"text {i}", "label": "even" if i % 2 == 0 else "odd"} for i in range(20)]


def names_of(head: dict[str, Any]) -> list[str]:
    names = list(head["id2label"].values())
    assert head["num_labels"] == len(names)
    assert head["label2id"] == {name: index for index, name in enumerate(names)}
    return names


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_rows_have_the_classes_of_the_known_order(
    named: bool, several: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    values: list[Any] = ["x", "y", "z"]
    kind: Any = Value("string")
    if named:
        values, kind = [0, 1, 2], ClassLabel(names=["x", "y", "z"])
    rows = [[value] for value in values] if several else values
    features = Features(text=Value("string"), label=List(kind) if several else kind)
    train = Dataset.from_dict({"text": ["a", "b", "c"], "label": rows}, features=features)
    encoded, head = labelled_text(DatasetDict(train=train), tokenizer, known=["z", "x", "y"])
    assert names_of(head) == ["z", "x", "y"]
    expected: list[Any] = [[0, 1, 0], [0, 0, 1], [1, 0, 0]] if several else [1, 2, 0]
    assert encoded["train"]["labels"][:] == expected


def columns(**values: list[Any]) -> DatasetDict:
    return DatasetDict(train=Dataset.from_dict({"text": ["a", "b", "c"][: len(values["label"])], **values}))


@pytest.fixture
def splits() -> DatasetDict:
    return DatasetDict(train=Dataset.from_list(ROWS[:15]), validation=Dataset.from_list(ROWS[15:]))


def test_classes_are_the_sorted_labels_of_the_training_split(
    splits: DatasetDict, tokenizer: PreTrainedTokenizerFast
) -> None:
    encoded, head = labelled_text(splits, tokenizer)
    assert names_of(head) == ["even", "odd"]
    assert encoded["validation"]["labels"] == [1, 0, 1, 0, 1]
    assert set(encoded["train"].column_names) == {"input_ids", "attention_mask", "labels"}
    assert encoded["train"][0]["input_ids"] == tokenizer("text 0")["input_ids"]


def test_integer_labels_with_gaps_are_mapped_to_classes(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": "a", "label": 7}, {"text": "b", "label": -1}, {"text": "c", "label": 7}]
    encoded, head = labelled_text(DatasetDict(train=Dataset.from_list(rows)), tokenizer)
    assert names_of(head) == ["-1", "7"]
    assert encoded["train"]["labels"] == [1, 0, 1]


def test_the_names_of_a_class_label_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes", "perhaps"])})
    train = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    encoded, head = labelled_text(DatasetDict(train=train), tokenizer)
    assert names_of(head) == ["no", "yes", "perhaps"]
    assert encoded["train"]["labels"] == [1, 0]


def test_names_of_a_class_label_are_read_beside_its_numbers(tokenizer: PreTrainedTokenizerFast) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    train = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    named = Dataset.from_dict({"text": ["a", "b"], "label": ["yes", "no"]})
    found = labelled_text(DatasetDict(train=train, validation=named), tokenizer)
    assert found.splits["validation"]["labels"][:] == [1, 0]
    other = Dataset.from_dict({"text": ["a", "b"], "label": ["yes", "perhaps"]})
    with pytest.raises(ValueError, match=r"row 2 .* has the label 'perhaps', expected one of the 2 classes"):
        labelled_text(DatasetDict(train=train, validation=other), tokenizer)


def test_texts_are_cut_at_max_length(splits: DatasetDict, tokenizer: PreTrainedTokenizerFast) -> None:
    encoded, _ = labelled_text(splits, tokenizer, max_length=2)
    assert {len(ids) for ids in encoded["train"]["input_ids"]} == {2}


@pytest.mark.parametrize(
    ("label", "message"),
    [("neither", "row 1 .* of the split 'validation' has the label 'neither'"), (None, "label None")],
)
def test_a_label_without_a_class_is_refused(
    splits: DatasetDict, tokenizer: PreTrainedTokenizerFast, label: str | None, message: str
) -> None:
    features = Features({"text": Value("string"), "label": Value("string")})
    splits["validation"] = Dataset.from_list([{"text": "x", "label": label}], features=features)
    with pytest.raises(ValueError, match=message):
        labelled_text(splits, tokenizer)


@pytest.mark.parametrize("names", [None, ["red", "green", "blue"]])
def test_lists_are_several_labels_of_each_text(tokenizer: PreTrainedTokenizerFast, names: list[str] | None) -> None:
    data = columns(label=[[2, 0], [], [0, 0]])
    if names is not None:
        data = data.cast_column("label", List(ClassLabel(names=names)))
    encoded, head = labelled_text(data, tokenizer)
    assert head["problem_type"] == "multi_label_classification"
    assert names_of(head) == (names or ["0", "2"])
    columns_of = [0, 2] if names else [0, 1]
    expected = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert [[row[c] for c in columns_of] for row in encoded["train"]["labels"]] == expected
    assert {len(row) for row in encoded["train"]["labels"]} == {head["num_labels"]}


@pytest.mark.parametrize("labels", [[1, 2, 5], [0.5, -1.0, 3.25]])
def test_numbers_are_kept_where_they_are_asked_for(tokenizer: PreTrainedTokenizerFast, labels: list[Any]) -> None:
    encoded, head = labelled_text(columns(label=labels), tokenizer, numbers=True)
    assert head == {"num_labels": 1, "problem_type": "regression"}
    assert encoded["train"]["labels"] == labels
    assert {type(label) for label in encoded["train"]["labels"]} == {float}


@pytest.mark.parametrize("label", [None, float("nan"), float("inf")])
def test_a_number_that_is_missing_or_not_finite_is_refused(
    tokenizer: PreTrainedTokenizerFast, label: float | None
) -> None:
    message = rf"row 2 \(counted from 1\) of the split 'train' has the label {label}, expected a finite number"
    with pytest.raises(ValueError, match=message):
        labelled_text(columns(label=[0.5, label]), tokenizer, numbers=True)


def test_words_are_no_numbers(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"label '4', expected a finite number: fill in the number, or drop the row"):
        labelled_text(columns(label=["4", "5"]), tokenizer, numbers=True)


def test_a_missing_list_or_an_unknown_class_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    data = columns(label=[["a"], ["b"]])
    for label in (None, ["a", "c"], [None]):
        features = Features({"text": Value("string"), "label": List(Value("string"))})
        data["validation"] = Dataset.from_list([{"text": "x", "label": label}], features=features)
        with pytest.raises(
            ValueError, match=r"row 1 .* of the split 'validation' .* a list out of the 2 labels \(a, b\)"
        ):
            labelled_text(data, tokenizer)


def test_text_pairs_are_encoded_together_with_token_types() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate(words)}, model_max_length=6)
    data = columns(other=["c", "c d", "d d d d d d d"], label=[0, 1, 0])
    encoded, _ = labelled_text(data, tokenizer, pair_column="other")
    assert encoded["train"]["input_ids"][1] == [2, 6, 3, 7, 8, 3]  # [CLS] b [SEP] c d [SEP]
    assert encoded["train"]["token_type_ids"][1] == [0, 0, 0, 1, 1, 1]
    assert len(encoded["train"]["input_ids"][2]) == 6
    alone, _ = labelled_text(data, tokenizer)
    assert set(alone["train"].column_names) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(ValueError, match="the split 'train' has no column 'second'"):
        labelled_text(data, tokenizer, pair_column="second")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "a"], "two classes or more"),
        ([[], []], "two classes or more"),
        ([2.0, 1.0], "integers or strings. .* To predict a number for each text, set regression"),
        (
            [[0.5], [1.0]],
            "lists of numbers .* integers or strings. .* one number for a text; several",
        ),
    ],
)
def test_one_class_or_whole_decimals_are_refused(
    tokenizer: PreTrainedTokenizerFast, labels: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        labelled_text(columns(label=labels), tokenizer)


@pytest.mark.parametrize(
    ("labels", "kinds"),
    [
        (["b", 2, "a"], "integers, text"),
        (["a", None, 3], "integers, text"),
        ([True, 1], "integers, true or false"),
        (["a", ["b"]], "lists, text"),
        ([["a"], [1]], "integers, text"),
        ([[["a"], 1], ["b"]], "integers, lists, text"),
        ([{"a": 1}, "x"], "mappings, text"),
    ],
)
def test_labels_of_several_kinds_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, labels: list[Any], kinds: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in labels))
    words = rf"the column 'label' holds values of several kinds \({kinds}\), expected classes of one kind: write each"
    if Version(datasets.__version__).major < 5:  # it does not read such a column
        words = r"rows.jsonl cannot be read as json \(JSON parse error: Column\(/label"
    with pytest.raises(ValueError, match=words):
        labelled_text(DatasetDict(train=load_rows(str(file))), tokenizer)


def test_a_column_has_one_use(splits: DatasetDict, tokenizer: PreTrainedTokenizerFast) -> None:
    for given in ({"label_column": "text"}, {"pair_column": "text"}, {"pair_column": "label"}):
        with pytest.raises(ValueError, match="the columns of the text, the second text and the label must differ"):
            labelled_text(splits, tokenizer, **given)


@pytest.mark.parametrize("name", ["null", "NA", "None"])
def test_a_class_that_a_csv_file_cannot_hold_is_explained(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    rows = [("a", "yes"), ("b", name), ("c", "no")]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    words = r"line 3 of .*rows.csv has the label None, .* null, None and the like also count as .* rename the class"
    loaded = load_splits(str(tmp_path / "rows.csv"), validation_fraction=0)
    with pytest.raises(ValueError, match=words):
        labelled_text(loaded.rows, tokenizer, place=loaded.place)
    with pytest.raises(ValueError, match=words):
        classes_of(load_rows(str(tmp_path / "rows.csv")), ["yes", "no"], what=str(tmp_path / "rows.csv"))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": t, "label": label}) for t, label in rows))
    loaded = load_splits(str(tmp_path / "rows.jsonl"), validation_fraction=0)
    assert names_of(labelled_text(loaded.rows, tokenizer, place=loaded.place).head) == sorted(["yes", "no", name])


def test_a_column_of_decimal_numbers_is_a_regression(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded, head = labelled_text(columns(label=[0.5, 1.0]), tokenizer)
    assert head == {"num_labels": 1, "problem_type": "regression"}
    assert encoded["train"]["labels"] == [0.5, 1.0]


def test_lists_are_no_numbers(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"'label' holds lists, expected a number for each text: .* docs/models.md"):
        labelled_text(columns(label=[[0.5, 1.0]]), tokenizer, numbers=True)


def test_rows_that_the_model_cannot_read_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The place is that in the file, where the rows were neither shuffled nor held out."""
    rows = [{"text": f"{'a b ' * 9 * (i == 5)}text", "label": i % 2} for i in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    loaded = load_splits(str(file), validation_fraction=0.25)
    labels = text_labels(loaded.rows, place=loaded.place).labels
    words = rf"line 6 of {file} has 40 tokens, more than the model's context of 12, .*: lower max_length to 12"
    with pytest.raises(ValueError, match=words):
        encoded_text(loaded.rows, tokenizer, labels, longest=12, place=loaded.place)
    assert encoded_text(loaded.rows, tokenizer, labels, longest=40, place=loaded.place).keys() == loaded.rows.keys()


def test_a_row_without_a_token_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = None
    data = DatasetDict(train=Dataset.from_dict({"text": ["a", "b", ""], "label": [0, 1, 1]}))
    words = r"row 3 \(counted from 1\) of {} has no token, expected text to predict a label from: leave the row out"
    with pytest.raises(ValueError, match=words.format("the split 'train'")):
        labelled_text(data, tokenizer)
    with pytest.raises(ValueError, match=words.format("other.csv")):
        unlabelled_text(data["train"], tokenizer, what="other.csv")


def test_texts_without_labels_are_encoded_as_labelled_ones(
    splits: DatasetDict, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = splits["train"].remove_columns("label")
    found = unlabelled_text(rows, tokenizer, what="other.csv", max_length=3)
    encoded, _ = labelled_text(splits, tokenizer, max_length=3)
    assert list(found) == list(encoded["train"].remove_columns("labels"))
    with pytest.raises(ValueError, match=r"other.csv has no column 'title', only text: name one of them"):
        unlabelled_text(rows, tokenizer, what="other.csv", text_column="title")


def test_a_wrong_label_is_named_by_its_place(splits: DatasetDict, tokenizer: PreTrainedTokenizerFast) -> None:
    splits["validation"] = Dataset.from_list([{"text": "x", "label": "even"}, {"text": "x", "label": "neither"}])
    with pytest.raises(ValueError, match=r"^validation 1 has the label 'neither', expected one of"):
        labelled_text(splits, tokenizer, place=lambda split, row: f"{split} {row}")
