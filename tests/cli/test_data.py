from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from hf_bayes.cli import data as data_module
from hf_bayes.cli.data import load_episode, load_rows, load_splits, named_files, texts_in


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".csv":
            path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
        case ".txt":
            path.write_text("\n".join(row["text"] for row in rows))
    return str(path)


ROWS = [{"text": f"text {i}", "label": "even" if i % 2 == 0 else "odd"} for i in range(20)]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_missing_validation_split_is_a_fixed_share_of_the_rows(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"rows{suffix}", ROWS)
    splits = load_splits(file, validation_fraction=0.2).rows
    assert (len(splits["train"]), len(splits["validation"])) == (16, 4)
    assert {*splits["train"]["text"], *splits["validation"]["text"]} == {row["text"] for row in ROWS}
    assert load_splits(file, validation_fraction=0.2).rows["validation"]["text"] == splits["validation"]["text"]
    assert load_splits(file, validation_fraction=0.2, seed=1).rows["validation"]["text"] != splits["validation"]["text"]


def test_one_text_is_cut_at_a_line_end_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "\n".join(f"line {i} of the book" for i in range(100))
    (tmp_path / "book.txt").write_text(content)
    splits = load_splits(str(tmp_path / "book.txt"), validation_fraction=0.15).rows
    head, tail = splits["train"][0]["text"], splits["validation"][0]["text"]
    assert head + tail == content
    assert tail.startswith("line")
    assert len(tail) / len(content) == pytest.approx(0.15, abs=0.02)


def test_files_and_globs_are_splits_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:5])
    write(tmp_path / "b.jsonl", ROWS[5:12])
    held_out = write(tmp_path / "held-out.jsonl", ROWS[12:])
    splits = load_splits(str(tmp_path / "?.jsonl"), validation_file=held_out).rows
    assert (len(splits["train"]), len(splits["validation"])) == (12, 8)


def test_a_validation_file_may_have_more_columns(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.csv", ROWS)
    more = write(tmp_path / "more.csv", [{"id": i, **row} for i, row in enumerate(ROWS[:4])])
    found = load_splits(rows, validation_file=more).rows["validation"]
    assert found.column_names == ["id", "text", "label"]
    assert found.remove_columns("id").to_list() == ROWS[:4]


def test_numbers_are_names_beside_a_file_with_names(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "7"}])
    (tmp_path / "more.jsonl").write_text('{"text": "c", "label": 7}')
    assert load_splits(rows, validation_file=str(tmp_path / "more.jsonl")).rows["validation"]["label"] == ["7"]


@pytest.mark.parametrize("split", [False, True])
def test_a_saved_data_set_is_read(tmp_path: Path, split: bool) -> None:
    rows = Dataset.from_list(ROWS)
    (DatasetDict(train=rows) if split else rows).save_to_disk(tmp_path / "saved")
    assert load_splits(str(tmp_path / "saved"), validation_fraction=0).rows["train"].to_list() == ROWS


def test_a_saved_data_set_has_its_own_validation_rows(tmp_path: Path) -> None:
    rows, folder = Dataset.from_list(ROWS), str(tmp_path / "saved")
    DatasetDict(train=rows, validation=rows.select([3]), test=rows.select([])).save_to_disk(folder)
    assert load_splits(folder).rows["validation"].to_list() == [ROWS[3]]
    DatasetDict(test=rows).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"other' has no split 'train', only test"):
        load_splits(str(tmp_path / "other"))


def test_arguments_for_another_kind_of_data_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    Dataset.from_list(ROWS).save_to_disk(folder)
    file = write(tmp_path / "rows.jsonl", ROWS)
    for name in (folder, file):
        with pytest.raises(ValueError, match=rf"dataset_config='a' is for a data set of the Hub, got '{name}': leave"):
            load_splits(name, config="a")
        with pytest.raises(ValueError, match=rf"revision='a' is for a data set of the Hub, got '{name}': leave"):
            load_splits(name, revision="a")
    with pytest.raises(ValueError, match=rf"goes with a local training file, got the folder '{folder}': leave it out"):
        load_splits(folder, validation_file=file)
    for load in (load_rows, load_episode, texts_in):
        with pytest.raises(ValueError, match=rf"{folder} is a folder, expected a file or a glob"):
            load(folder)


def test_text_files_are_one_text_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.txt", ROWS)
    splits = load_splits(str(tmp_path / "*.txt"), validation_fraction=0.3).rows
    assert (len(splits["train"]), len(splits["validation"])) == (2, 1)


def test_a_fraction_of_0_holds_no_row_out(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    splits = load_splits(rows, validation_fraction=0.0).rows
    assert list(splits) == ["train"]
    assert splits["train"].to_list() == ROWS
    # an existing validation split is not replaced by the fraction
    splits = load_splits(rows, validation_file=rows, validation_fraction=0.0).rows
    assert len(splits["validation"]) == len(ROWS)
    assert list(load_splits(rows, validation_fraction=0).rows) == ["train"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gap.csv", "text,label\nhello there,2\n,4\nmore of it,5\n", r"line 3 of .*gap.csv: 'text' holds nothing"),
        ("na.csv", "text,label\na b,2\nNA,4\n", r"line 3 of .*na.csv: 'text' .* NA, null, None and the like also"),
        ("gap.jsonl", '{"text": "a b"}\n{"text": null}\n', r"line 2 of .*gap.jsonl: 'text' holds nothing"),
        ("numbers.csv", "text,label\n1,2\n3,4\n", r"numbers.csv': the column 'text' holds int64, expected text"),
        (
            "lists.jsonl",
            '{"text": ["a", "b"]}\n{"text": ["c"]}\n',
            r"lists.jsonl': the column 'text' holds List, expected text",
        ),
    ],
)
def test_a_row_that_is_no_text_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    for load in (load_splits, load_episode):
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path / name))


def test_bad_data_is_refused(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "letter.txt").write_text("w")
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(FileNotFoundError, match=r"no file matches .*nowhere\.csv"):
        load_splits(str(tmp_path / "nowhere.csv"))
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        load_splits(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no column 'body', only text, label"):
        load_splits(rows, text_column="body")
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=rf"at least 0, which holds no row out, and below 1, got {fraction}"):
            load_splits(rows, validation_fraction=fraction)
    with pytest.raises(ValueError, match="too short to hold out a part"):
        load_splits(str(tmp_path / "letter.txt"))
    with pytest.raises(
        ValueError, match=r"letter\.txt' is too short to hold out 0.15 of it as its end: give more text"
    ):
        load_episode(str(tmp_path / "letter.txt"))
    with pytest.raises(ValueError, match=r"notes.md is a file of another format, expected one of .txt"):
        load_splits(rows, validation_file=str(tmp_path / "notes.md"))
    with pytest.raises(ValueError, match="goes with a local training file"):
        load_splits("someone/dataset", validation_file=rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_of_a_file_keep_their_order(tmp_path: Path, suffix: str) -> None:
    rows = load_rows(write(tmp_path / f"rows{suffix}", ROWS))
    assert list(rows) == ROWS
    with pytest.raises(ValueError, match=r"a.txt is one text, expected rows: give a .jsonl, .csv or .parquet file"):
        load_rows(str(tmp_path / "a.txt"))
    with pytest.raises(FileNotFoundError, match="no file matches"):
        load_rows(str(tmp_path / "b.csv"))


def test_pairs_name_files_in_their_order() -> None:
    found = named_files("t.txt", ["b=x=1.txt", "a=dir/y.txt"])
    assert list(found.items()) == [("test", "t.txt"), ("b", "x=1.txt"), ("a", "dir/y.txt")]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["other.txt"], r"takes name=file for each set, such as code=code.txt, got 'other.txt': give the file a name"),
        (["=other.txt"], "got '=other.txt': give the file a name"),
        (["code="], "got 'code=': give"),
        (
            ["code=a.txt", "test=b.txt"],
            r"got 'test=b.txt', and \"test\" is the file of --test \(t.txt\): choose another",
        ),
        (["code=a.txt", "code=b.txt"], "got the name 'code' for a.txt and for b.txt: give each set its own"),
    ],
)
def test_pairs_that_would_lose_a_file_are_refused(pairs: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named_files("t.txt", pairs)


def test_an_episode_holds_out_the_end_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {index:03d}" for index in range(100)]
    (tmp_path / "book.txt").write_text("\n".join(lines))
    train, test = load_episode(str(tmp_path / "book.txt"))
    assert len(train) == len(test) == 1
    assert (train[0]["text"] + test[0]["text"]).splitlines() == lines
    assert test[0]["text"].splitlines() == lines[-len(test[0]["text"].splitlines()) :]
    assert len(test[0]["text"]) / 899 == pytest.approx(0.15, abs=0.01)
    with pytest.raises(ValueError, match=r"held_out must lie strictly between 0 and 1, got 1\.5"):
        load_episode(str(tmp_path / "book.txt"), held_out=1.5)
    asked: list[Any] = []

    def load(name: str, config: str | None, split: str) -> Dataset:
        asked.append((name, config, split))
        return Dataset.from_dict({"text": ["first words of a text", "last words of another"]})

    monkeypatch.setattr(data_module, "load_dataset", load)
    train, _ = load_episode("owner/name:validation[:10%]")
    load_episode("owner/name/config")
    assert asked == [("owner/name", None, "validation[:10%]"), ("owner/name", "config", "train")]
    assert train[0]["text"] == "first words of a text\n\n"  # cut at the line end before the 85 %


def test_held_out_rows_keep_their_place_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"text": f"number {i}"} for i in range(9)])
    splits = load_splits(file, validation_fraction=0.3)
    for name, rows in splits.rows.items():
        for row, text in enumerate(rows["text"]):
            assert splits.place(name, row) == f"line {int(text.split()[1]) + 1} of {file}"


def test_texts_are_read_whole_or_by_row(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\nb")
    (tmp_path / "two.txt").write_text("c")
    (tmp_path / "rows.csv").write_text('body,n\n"d\ne",1\nf,2\n')
    assert texts_in(str(tmp_path / "*.txt")) == ["a\nb", "c"]
    assert texts_in(str(tmp_path / "rows.csv"), "body") == ["d\ne", "f"]
    with pytest.raises(ValueError, match=r"rows.csv has no column 'text', only body, n: name one of them"):
        texts_in(str(tmp_path / "rows.csv"))
    (tmp_path / "page.md").write_text("a")
    with pytest.raises(ValueError, match=r"page.md is a file of another format, expected one of .txt"):
        texts_in(str(tmp_path / "page.md"))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("A chain.\nAnother one.\n", encoding="utf-8-sig")
    file = str(tmp_path / "one.txt")
    assert texts_in(file) == ["A chain.\nAnother one.\n"]
    assert load_splits(file, validation_fraction=0).rows["train"]["text"][0] == "A chain.\nAnother one.\n"
    train, test = load_episode(file, held_out=0.5)
    assert train["text"][0] + test["text"][0] == "A chain.\nAnother one.\n"
