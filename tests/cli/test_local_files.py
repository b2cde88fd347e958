from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from packaging.version import Version

from hf_bayes.cli.local_files import is_local, is_saved, load_files, load_saved, matching, saved_splits, with_kinds_of


def write(folder: Path, **files: str) -> list[str]:
    """Write files, whose names have _ in place of the dot, and return their paths."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return [str(folder / name.replace("_", ".")) for name in files]


def test_endings_in_capitals_and_tables_with_tabs_are_read(tmp_path: Path) -> None:
    files = write(tmp_path, a_CSV="text,label\na b,x\n", b_tsv="text\tlabel\na b\tx\n")
    for file in files:
        assert is_local(file)
        assert list(load_files([file])) == [{"text": "a b", "label": "x"}]
    assert matching(str(tmp_path / "*")) == files
    assert not is_local("someone/dataset")


@pytest.mark.parametrize(("separator", "words"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_of_a_table_is_named(tmp_path: Path, separator: str, words: str) -> None:
    files = write(tmp_path, a_csv=f"text{separator}label\na, b{separator}x\n")
    message = rf"a.csv has {words} between its columns \(text, label\), expected commas: save it with commas, or with"
    with pytest.raises(ValueError, match=message):
        load_files(files)


def test_a_quote_in_a_table_with_tabs_joins_no_rows(tmp_path: Path) -> None:
    texts = ['"begins here', "plain", 'ends here"', '"odd']
    files = write(tmp_path, a_tsv="text\tlabel\n" + "".join(f"{text}\tx\n" for text in texts))
    assert list(load_files(files)["text"]) == texts


def test_separators_in_the_names_of_columns_count_for_nothing(tmp_path: Path) -> None:
    files = write(tmp_path, a_csv='"text; or not"\na b\n', b_csv='text;"label, class"\na b;x\n')
    assert load_files(files[:1]).column_names == ["text; or not"]
    with pytest.raises(ValueError, match=r"b.csv has semicolons between its columns \(text, label, class\)"):
        load_files(files[1:])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder, expected a file or a glob: name the files in it"):
        matching(str(tmp_path))


def test_files_with_other_columns_are_no_matter_of_encoding(tmp_path: Path) -> None:
    files = write(tmp_path, a_csv="text,label\na,x\n", b_csv="id,text,label\n1,a,x\n")
    files += write(tmp_path, a_jsonl='{"text": "a"}', b_jsonl='{"text": "a", "id": 0}')
    for pair, columns in ((files[:2], "id, text, label"), (files[2:], "text, id")):
        with pytest.raises(ValueError, match=rf"^{pair[1]} has the columns {columns}, and {pair[0]} has text.*: give"):
            load_files(pair)
    with pytest.raises(ValueError, match=r"broken.jsonl cannot be read as json \(.*\): correct the file$"):
        load_files(write(tmp_path, broken_jsonl='{"text": "a"}\n{"text": \n'))


def test_a_file_in_another_encoding_is_explained(tmp_path: Path) -> None:
    for name in ("latin.txt", "latin.csv", "latin.tsv"):
        (tmp_path / name).write_bytes("text\ncaf\xe9\n".encode("latin-1"))
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read as \w+ .*: correct the file, and save it in UTF-8$"
        ):
            load_files([str(tmp_path / name)])


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_json_in_another_encoding_is_named_with_its_line(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"latin.{ending}"
    file.write_bytes('{"text": "a"}\n{"text": "caf\xe9"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"line 2 of .*latin.{ending} is no UTF-8 .*: save the file in UTF-8"):
        load_files([str(file)])


@pytest.mark.skipif(Version(datasets.__version__).major < 5, reason="datasets 4 reads both columns as text")
def test_kinds_that_differ_between_files_are_shown(tmp_path: Path) -> None:
    files = write(tmp_path, a_csv="text,label\na,x\n", b_csv="text,label\nb,1\n")
    with pytest.raises(ValueError, match=r"cannot be read as csv \(.*label: .*string vs .*label: int64\): correct the"):
        load_files(files)


def test_files_that_number_classes_differently_are_refused(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    for file, names in zip(files, (["neg", "pos"], ["pos", "neg"]), strict=True):
        features = Features({"label": ClassLabel(names=names)})
        Dataset.from_dict({"label": [0, 1]}, features=features).to_parquet(file)
    assert load_files(files[:1]).features["label"].names == ["neg", "pos"]
    with pytest.raises(ValueError, match=r"'label' has the classes pos, neg in .*b.parquet, and neg, pos in .*a.parq"):
        load_files(files)


@pytest.mark.parametrize("several", [False, True])
def test_classes_with_names_are_converted_by_name(several: bool) -> None:
    def rows(labels: list[int | None], *names: str) -> Dataset:
        kind = ClassLabel(names=list(names))
        features = Features({"label": List(kind) if several else kind, "text": Value("string")})
        values = [[label] for label in labels] if several else labels
        return Dataset.from_dict({"label": values, "text": ["a"] * len(labels)}, features=features)

    first = rows([0, 1], "neg", "pos")
    found = with_kinds_of(rows([0, 1, 0], "pos", "neg"), first)
    assert found.features == first.features
    assert list(found["label"]) == ([[1], [0], [1]] if several else [1, 0, 1])
    names = Dataset.from_dict({"label": [["neg"]] if several else ["neg"]})
    assert list(with_kinds_of(rows([0, 1], "pos", "neg"), names)["label"]) == (
        [["pos"], ["neg"]] if several else ["pos", "neg"]
    )
    assert list(with_kinds_of(rows([0, 1], "pos", "new"), first)["label"]) == (
        [["pos"], ["new"]] if several else ["pos", "new"]
    )  # refused later, by name


def test_a_saved_folder_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).with_format("torch").save_to_disk(folder)
    before = sorted(folder.iterdir())
    assert is_saved(str(folder))
    assert saved_splits(str(folder)) == {"train": folder}
    rows = load_saved(folder)
    assert list(rows) == [{"text": "a", "label": 0}, {"text": "b", "label": 1}]  # no tensors
    rows.map(lambda row: {"length": len(row["text"])})
    assert sorted(folder.iterdir()) == before
    before[0].unlink()  # the rows
    with pytest.raises(ValueError, match=rf"{folder} cannot be read as a folder of save_to_disk .*: correct the file"):
        load_saved(folder)


def test_columns_get_the_kinds_of_other_rows_where_they_can() -> None:
    first = Dataset.from_dict({"text": ["a"], "label": ["x"], "n": [1]})
    rows = with_kinds_of(Dataset.from_dict({"text": ["b"], "label": [7], "n": ["y"], "id": [0]}), first)
    assert list(rows) == [{"text": "b", "label": "7", "n": "y", "id": 0}]
