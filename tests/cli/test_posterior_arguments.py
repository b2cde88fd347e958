from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.cli.posterior_arguments import PosteriorArguments, given_texts
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_bert, tiny_tokenizer


def test_texts_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one\ntwo")
    (tmp_path / "rows.jsonl").write_text('{"query": "one"}\n{"query": "two"}')
    options = {"column": "query", "flag": "--text"}
    assert given_texts(["one", "two"], None, **options) == ["one", "two"]
    assert given_texts([], str(tmp_path / "one.txt"), **options) == ["one\ntwo"]
    assert given_texts([], str(tmp_path / "rows.jsonl"), **options) == ["one", "two"]


@pytest.mark.parametrize(("texts", "file", "given"), [(["a"], "a.txt", "both"), ([], None, "neither")])
def test_texts_from_both_or_neither_are_refused(texts: list[str], file: str | None, given: str) -> None:
    with pytest.raises(ValueError, match=f"give the text by --text or by --file, got {given}"):
        given_texts(texts, file, column="text", flag="--text")


def test_a_classifier_has_no_tokens_to_score(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=2)
    rows = runs.label_rows(num_labels=2)
    trainer = runs.trainer(
        tmp_path / "out", method, model=tiny_bert(num_labels=2), train=rows, processing_class=tiny_tokenizer(),
        subspace="last_layer",
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    with pytest.raises(ValueError, match=r"hf-bayes score takes the posterior of a language model, got .*out"):
        PosteriorArguments(str(tmp_path / "out")).text_pipeline("score")
