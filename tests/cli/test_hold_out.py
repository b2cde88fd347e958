from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset

from hf_bayes.cli.data import load_splits
from hf_bayes.cli.hold_out import cut_text, keep_classes


def labelled(folder: Path, labels: list[Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"text {i}", "label": label}) for i, label in enumerate(labels)))
    return str(file)


@pytest.mark.parametrize("several", [False, True])
def test_the_training_rows_keep_a_row_of_each_class(tmp_path: Path, several: bool) -> None:
    names = [f"class {i % 40}" for i in range(120)]
    file = labelled(tmp_path, [[name, "all"] for name in names] if several else names)
    for seed in range(4):
        plain = load_splits(file, validation_fraction=0.3, seed=seed)
        found = load_splits(file, validation_fraction=0.3, seed=seed, label_column="label")
        assert {name: len(rows) for name, rows in found.rows.items()} == {"train": 84, "validation": 36}
        assert sorted([*found.numbers["train"], *found.numbers["validation"]]) == list(range(120))
        assert {names[row] for row in found.numbers["train"]} == set(names)
        missing = set(names) - {names[row] for row in plain.numbers["train"]}
        assert len(set(found.numbers["train"]) - set(plain.numbers["train"])) == len(missing)


def test_a_split_with_all_classes_stays_as_it_is(tmp_path: Path) -> None:
    numbers_to_predict = [i + 0.5 for i in range(40)]  # each occurs once, and is no class
    for labels in (["a", "b"] * 20, numbers_to_predict, [None, *["a", "b"] * 20]):
        file = labelled(tmp_path, labels)
        numbers = load_splits(file).numbers
        assert load_splits(file, label_column="label").numbers == numbers
        assert load_splits(file, label_column="other").numbers == numbers  # refused later, with the file's columns


def test_classes_with_names_of_their_own_change_no_split(tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(40)]
    rows = Dataset.from_dict({"text": ["a b"] * 120, "label": [i % 40 for i in range(120)]})
    rows = rows.cast_column("label", ClassLabel(names=names))
    rows.save_to_disk(tmp_path / "saved")
    plain, found = (load_splits(str(tmp_path / "saved"), label_column=column) for column in (None, "label"))
    assert found.numbers == plain.numbers


def test_values_that_are_no_classes_change_no_split(tmp_path: Path) -> None:
    file = labelled(tmp_path, [{"score": i} for i in range(20)])
    assert load_splits(file, label_column="label").numbers == load_splits(file).numbers  # refused later, as mappings


def test_rows_move_alone_if_none_can_be_spared() -> None:
    kept, held = [0, 1], [2, 3, 4]
    keep_classes(kept, held, [{"a"}, {"b"}, {"b"}, {"c"}, {"d"}])
    assert (kept, held) == ([0, 1, 3, 4], [2])
    with pytest.raises(ValueError, match="no row can be held out, because each of the 3 rows is the only one of its"):
        keep_classes([0, 1], [2], [{"a"}, {"b"}, {"c"}])


def test_a_text_is_cut_at_the_last_line_end_before_its_share() -> None:
    parts = cut_text("one\ntwo\nthree", 0.7, column="body")
    assert parts is not None
    assert [part["body"] for part in parts] == [["one\ntwo\n"], ["three"]]
    assert cut_text("w", 0.7, column="body") is None
