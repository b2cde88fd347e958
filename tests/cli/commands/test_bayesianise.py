from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2ForSequenceClassification

from hf_bayes import BayesianModelForCausalLM, BayesianModelForSequenceClassification, Posterior
from hf_bayes.cli.commands import bayesianise
from hf_bayes.cli.main import main
from tests.tiny_models import TEXTS, tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora

VERDICT = r"scale \S+, the largest.* on \d+ held-out rows\. On \d+ other held-out rows: .*(better|neither)"


def adapter_of(folder: Path, model: Any) -> str:
    """Return the folder of a plain peft adapter that changes its base model."""
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    adapted = with_lora(type(model).from_pretrained(folder / "base"))
    adapted.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def test_an_adapter_of_a_language_model_becomes_a_posterior(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of(tmp_path, tiny_llama())
    (tmp_path / "dev.txt").write_text("\n".join(TEXTS * 20))
    given = ["--heldout", str(tmp_path / "dev.txt"), "--length", "16", "--output_dir", str(tmp_path / "out")]
    assert main(["bayesianise", adapter, *given]) == 0
    assert re.search(VERDICT, capsys.readouterr().out)
    saved = Posterior.from_pretrained(tmp_path / "out")
    assert saved.config.method["name"] == "training_free"
    model = BayesianModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.tensor([[5, 6, 7]])
    assert model(input_ids=tokens).epistemic.min() > 0


def test_a_classifier_needs_the_names_of_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of(tmp_path, tiny_bert(num_labels=3))
    lines = [f'"{TEXTS[i % 4]} {i}",{("red", "green", "blue")[i % 3]}' for i in range(60)]
    (tmp_path / "dev.csv").write_text("\n".join(["text,label", *lines]))
    given = ["--heldout", str(tmp_path / "dev.csv"), "--output_dir", str(tmp_path / "out"), "--scales", "layer"]
    assert main(["bayesianise", adapter, *given]) == 2
    assert "LABEL_0" in capsys.readouterr().err
    assert main(["bayesianise", adapter, *given, "--labels", "red", "green", "blue"]) == 0
    assert re.search(VERDICT, capsys.readouterr().out)
    model = BayesianModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert list(model.config.id2label.values()) == ["red", "green", "blue"]


@pytest.mark.parametrize("beside", [True, False], ids=["tokenizer beside the adapter", "tokenizer of the base"])
def test_a_decoder_without_padding_becomes_a_classifier(tmp_path: Path, beside: bool) -> None:
    labels = {"id2label": {0: "even", 1: "odd"}, "label2id": {"even": 0, "odd": 1}}
    adapter = adapter_of(tmp_path, GPT2ForSequenceClassification(tiny_gpt2(pad_token_id=None, **labels).config))
    tokenizer = tiny_tokenizer()
    if beside:
        tokenizer.save_pretrained(adapter)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [f'"{TEXTS[i % 4]} {i}",{("even", "odd")[i % 2]}' for i in range(60)]
    (tmp_path / "dev.csv").write_text("\n".join(["text,label", *rows]))
    given = ["--heldout", str(tmp_path / "dev.csv"), "--output_dir", str(tmp_path / "out")]
    assert main(["bayesianise", adapter, *given]) == 0
    model = BayesianModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.pad_token_id == (0 if beside else 2)


def test_the_posterior_that_is_read_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_of(tmp_path, tiny_llama())
    (tmp_path / "dev.txt").write_text("\n".join(TEXTS * 20))
    given = ["--heldout", str(tmp_path / "dev.txt"), "--length", "16"]
    assert main(["bayesianise", adapter, *given, "--output_dir", str(tmp_path / "own")]) == 0
    before = Posterior.from_pretrained(tmp_path / "own").fingerprint
    (tmp_path / "link").symlink_to(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "own", "--custom_generate", "draws", "--members", "2"]) == 0
    monkeypatch.setattr(bayesianise, "load_adapter", None)  # it is refused before a model is loaded
    capsys.readouterr()
    for place, output in (
        ("own", "own"), ("own", str(tmp_path / "own")), ("link", "own/"), ("own", "link"),
        ("draws/members/member_001", "draws"),  # an adapter of its own, which the new posterior would remove
    ):  # fmt: skip
        assert main(["bayesianise", place, *given, "--output_dir", output]) == 2
        assert f"--output_dir {output}: a save there would replace {place}, of which" in capsys.readouterr().err
    assert Posterior.from_pretrained(tmp_path / "own").fingerprint == before
    assert Posterior.from_pretrained(tmp_path / "draws").config.num_members == 2


def test_a_misfit_names_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of(tmp_path, tiny_bert(num_labels=4))
    tiny_bert(num_labels=3).save_pretrained(tmp_path / "base")
    (tmp_path / "dev.csv").write_text("text,label\na,red\n")
    given = ["--heldout", str(tmp_path / "dev.csv"), "--output_dir", str(tmp_path / "out")]
    capsys.readouterr()
    for labels in ((), ("--labels", "a", "b", "c")):
        assert main(["bayesianise", adapter, *given, *labels]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"hf-bayes bayesianise: {adapter}: the base model has shape [3] where ")


def test_wrong_input_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of(tmp_path, tiny_llama())
    (tmp_path / "dev.txt").write_text(" ".join(TEXTS))
    capsys.readouterr()
    for given, words in {
        ("--tolerance", "-1"): "tolerance must be a finite number >= 0",
        (): "--heldout is needed, got none",
        ("--heldout", str(tmp_path / "dev.txt"), "--labels", "a"): "--labels: not for a language model",
        ("--heldout", str(tmp_path / "dev.txt"), "--length", "60"): "heldout needs at least 8 rows, got",
        ("--heldout", str(tmp_path / "dev.txt"), "--label_column", "x"): "--label_column: not for the task",
    }.items():
        assert main(["bayesianise", adapter, *given]) == 2
        told = capsys.readouterr().err.strip()
        assert words in told
        assert "\n" not in told
