from __future__ import annotations

import codecs
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# A script's own folder is on the path when it runs.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora, package_docstrings


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    return corpora()


def test_no_paragraph_stands_in_two_texts(texts: dict[str, list[str]]) -> None:
    prose = [name for name in texts if name not in ("code", "rot13")]
    paragraphs = [line for name in prose for text in texts[name] for line in text.splitlines()]
    assert len(paragraphs) > 5000
    assert len(paragraphs) == len(set(paragraphs))


def test_corpora_are_large_enough_and_english(texts: dict[str, list[str]]) -> None:
    # shares of the language reference and lower bounds for any CPython
    smallest = {"pretrain": 500_000, "finetune": 80_000, "validation": 20_000, "test": 30_000, "code": 100_000}
    for name, least in smallest.items():
        assert sum(map(len, texts[name])) > least
    held_out = " ".join(texts["test"]).lower()
    assert held_out.count(" the ") > 500
    assert codecs.decode("\n".join(texts["rot13"]), "rot13") == "\n".join(texts["test"])
    assert sum(code.count('"""') for code in texts["code"]) < len(texts["code"])


def test_base_model_learns_and_loads(texts: dict[str, list[str]], tmp_path: Path) -> None:
    few = texts["pretrain"][:40]
    tokenizer = train_tokenizer(few, vocabulary=512)
    report = pretrain_base(few[:10], tokenizer, tmp_path, length=32, epochs=0.2)
    assert report["loss"] < 6.0  # log 512 = 6.24
    assert 1e6 < report["parameters"] < 5e6
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    held_out = windows(texts["test"][:2], loaded, length=16, limit=8)
    ids = torch.tensor(held_out["input_ids"])
    assert ids.shape == (8, 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 7.0


def test_any_text_can_be_written_in_the_tokenizer(texts: dict[str, list[str]]) -> None:
    tokenizer = train_tokenizer(texts["pretrain"][:20], vocabulary=512)
    for name in texts:
        sample = texts[name][0][:500]
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def test_docstrings_of_packages_leave_out_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = "A paragraph of more than forty letters that nobody has seen before."
    old = "Another paragraph of more than forty letters that stands elsewhere."
    (tmp_path / "documented_here").mkdir()
    (tmp_path / "documented_here" / "__init__.py").write_text(f'"""{new}\n\n{old}\n\n{new}\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert package_docstrings(["documented_here"], [f"first\n{old}"]) == [new]
    assert package_docstrings(["documented_here"], []) == [f"{new}\n{old}"]
    with pytest.raises(ModuleNotFoundError, match="pip install no_such_package"):
        package_docstrings(["no_such_package"], [])
