from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bayes import Posterior, distil
from hf_bayes.cli.commands.evaluate import COMMAND, EvaluationArguments
from hf_bayes.cli.main import main
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.fit import distil_training
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.members.subject_models import bert_tagger
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer, with_lora

ROOT = Path(__file__).parents[3]
CLASSES = {"id2label": {0: "even", 1: "odd"}, "label2id": {"even": 0, "odd": 1}}
METHOD = SGHMCConfig(num_chains=2, init_jitter=1.0)


def saved(folder: Path, model: Any, **fields: Any) -> str:
    """Return the directory of a posterior of two members over a tiny model."""
    model.save_pretrained(folder / "base")
    tokenizer = tiny_tokenizer()
    adapted = with_lora(type(model).from_pretrained(folder / "base"))
    trainer = runs.trainer(folder / "posterior", METHOD, model=adapted, processing_class=tokenizer, **fields)
    trainer.train()
    trainer.save_model()
    return str(folder / "posterior")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(
        tmp_path_factory.mktemp("classifier"), tiny_bert(num_labels=2, **CLASSES), train=runs.label_rows(num_labels=2)
    )


def test_a_student_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classifier: str) -> None:
    monkeypatch.setattr(distil_training, "UPDATES", 30)
    folder = str(tmp_path / "distilled")
    distil(classifier, runs.label_rows(220), batch_size=20, progress=False).save_pretrained(folder)
    arguments = ["--posterior", folder, "--test", table_of(tmp_path / "test.csv"), "--text_column", "query"]
    results = evaluate(tmp_path, *arguments, "--label_column", "parity", "--predict", "distilled")
    assert results["members"] == 1
    assert "member_nll" not in results
    assert results["epistemic"] > 0


def test_numbers_of_a_weighted_likelihood_have_no_weights(tmp_path: Path) -> None:
    train = [row | {"label": float(row["label"]), "weight": 0.5} for row in runs.label_rows()]
    model = tiny_bert(num_labels=2)
    posterior = saved(tmp_path, model, train=train, likelihood=Weighted(Heteroscedastic(), column="weight"))
    (tmp_path / "test.csv").write_text("\n".join(["text,label", *(f'"{TEXTS[i % 4]} {i}",{i / 4}' for i in range(12))]))
    results = evaluate(tmp_path, "--posterior", posterior, "--test", str(tmp_path / "test.csv"))
    assert results["kind"] == "own_numbers"
    assert results["predictive_std"] > results["aleatoric_std"] > 0
    assert results["rmse"] > 0


def table_of(path: Path, *, labels: tuple[str, ...] = ("even", "odd")) -> str:
    rows = [f'"{TEXTS[i % 4]} {i}",{labels[i % len(labels)]}' for i in range(12)]
    path.write_text("\n".join(["query,parity", *rows]))
    return str(path)


def evaluate(folder: Path, *arguments: str) -> dict[str, Any]:
    given = [*arguments, "--output_dir", str(folder / "out")]
    COMMAND.run(*parse_arguments(*COMMAND.arguments, arguments=given))
    assert (folder / "out" / "uncertainty.png").stat().st_size > 10_000
    found: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return found


def test_no_rows_in_a_batch_are_refused_before_loading() -> None:
    with pytest.raises(ValueError, match="--batch_size must be at least 1, got 0"):
        EvaluationArguments(posterior="out", test="t.txt", batch_size=0)


def test_every_text_of_a_language_model_has_its_figures(tmp_path: Path) -> None:
    for number, name in enumerate(["test", "code", "rot13"]):
        (tmp_path / f"{name}.txt").write_text("\n".join(np.roll(TEXTS * 8, number)[number:]))
    arguments = ["--posterior", saved(tmp_path, tiny_llama()), "--test", str(tmp_path / "test.txt"), "--length", "16"]
    others = [f"{name}={tmp_path / name}.txt" for name in ("code", "rot13")]
    results = evaluate(tmp_path, *arguments, "--ood", *others)
    assert (results["task"], results["members"]) == ("causal_lm", 2)
    assert list(results["auroc"]) == ["code", "rot13"]
    assert results["perplexity"] == pytest.approx(np.exp(results["nll"]))


def test_a_window_longer_than_the_context_is_refused(
    tmp_path: Path, posterior: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.txt").write_text("\n".join(TEXTS * 8))
    assert main(["evaluate", posterior, "--test", str(tmp_path / "test.txt"), "--length", "129"]) == 2
    assert "--length=129 is longer than the model's longest context, 128 tokens: lower it" in capsys.readouterr().err


def test_a_missing_file_is_found_before_the_model_is_loaded() -> None:
    with pytest.raises(FileNotFoundError, match=r"no file matches 'missing\.txt'"):
        COMMAND.run(*parse_arguments(*COMMAND.arguments, arguments=["--posterior", "nowhere", "--test", "missing.txt"]))


def test_a_classifier_is_evaluated_from_a_table(
    tmp_path: Path, classifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"query": text[::-1]}) for text in TEXTS))
    arguments = ["--posterior", classifier, "--test", table_of(tmp_path / "test.csv"), "--text_column", "query"]
    other = f"backwards={tmp_path / 'other.jsonl'}"
    results = evaluate(tmp_path, *arguments, "--label_column", "parity", "--ood", other)
    assert (results["task"], results["members"]) == ("sequence_classification", 2)
    assert results["posterior"] == Posterior.from_pretrained(classifier).fingerprint
    assert results["rows"] == {"test": 12, "backwards": 4}
    assert {"nll", "member_nll", "accuracy", "ece", "brier"} <= set(results)
    assert "perplexity" not in results
    assert set(results["aurc"]) == {"total", "epistemic", "confidence", "best"}
    assert set(results["auroc"]["backwards"]) == {"total", "epistemic", "confidence"}
    printed = capsys.readouterr().out
    assert f"{results['auroc']['backwards']['epistemic']:.4f}" in printed
    assert "perplexity" not in printed


def test_a_stored_temperature_is_applied_unless_refused(tmp_path: Path, classifier: str) -> None:
    posterior = Posterior.from_pretrained(classifier)
    numbers = {"log_std_error": 0.1, "nll": 1.0, "calibrated_nll": 0.9, "nll_std_error": 0.1, "num_terms": 9}
    calibration = {"temperature": 2.0, **numbers, "num_members": 2, "prediction": "members"}
    config = dataclasses.replace(posterior.config, calibration=calibration)
    dataclasses.replace(posterior, config=config).save_pretrained(tmp_path / "calibrated")
    arguments = ["--posterior", str(tmp_path / "calibrated"), "--test", table_of(tmp_path / "test.csv")]
    arguments += ["--text_column", "query", "--label_column", "parity"]
    calibrated = evaluate(tmp_path, *arguments)
    plain = evaluate(tmp_path, *arguments, "--calibrated", "false")
    assert (calibrated["temperature"], plain["temperature"]) == (2.0, 1.0)
    assert calibrated["total"] > plain["total"]
    assert calibrated["accuracy"] == plain["accuracy"]


def test_the_command_of_the_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classifier: str
) -> None:
    page = (ROOT / "docs" / "uncertainty.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^hf-bayes (evaluate (?:.*\\\n)*.*)$", page, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(classifier, "posterior")
    rows = [{"text": f"{TEXTS[i % 4]} {i}", "label": ("even", "odd")[i % 2]} for i in range(8)]
    for name in ("test", "out_of_scope"):
        Path(f"{name}.csv").write_text("\n".join(["text,label", *(f'"{row["text"]}",{row["label"]}' for row in rows)]))
    Path("news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    assert set(json.loads(Path("evaluation/results.json").read_text())["auroc"]) == {"out_of_scope", "news"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"label_column": "class"}, r"test.csv has no column 'class', only query, parity: name one of them"),
        (
            {"label_column": "query", "text_column": "parity"},
            r"line 2 of .*test.csv has the label 'The mito.*', expected one of the 2 classes",
        ),
        ({"label_column": "query"}, "the columns of the text, .* must differ, got query, query: the label would be"),
        ({"text_column": "text"}, r"test.csv has no column 'text', only query, parity: name one of them"),
        ({"length": "64"}, r"--length: not for the task of the posterior .*posterior, leave it out"),
        ({"test": "test.txt"}, r"test.txt is one text, expected rows: give a .jsonl, .csv or .parquet file"),
        ({"ood": "other.csv"}, r"--ood takes name=file for each set, .* got 'other.csv': give the file a name"),
        ({"padding": "data", "ood": "x=missing.csv"}, r"no file matches 'missing.csv'"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classifier: str, fields: dict[str, str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("test.txt", "other.csv"):
        Path(name).touch()
    usual = {"posterior": classifier, "test": table_of(tmp_path / "test.csv")}
    usual |= {"text_column": "query", "label_column": "parity"}
    flags = [word for name, value in {**usual, **fields}.items() for word in (f"--{name}", value)]
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        evaluate(tmp_path, *flags)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


SEVERAL = {"problem_type": "multi_label_classification", **CLASSES}
OTHER_TASKS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], dict[str, Any]]] = {
    "several_labels": (lambda: tiny_bert(num_labels=2, **SEVERAL), lambda i: [1.0, i % 2], {}),
    "numbers": (lambda: tiny_bert(num_labels=1), lambda i: i / 5, {"noise_std": 0.5}),
    "tags": (
        lambda: bert_tagger(torch.float32), lambda i: [-100, 1, 2, 0, 1, 0], {"collator": runs.padding_collator()}
    ),
}  # fmt: skip
"""The kind of the labels -> a model, the label of row i, and further arguments of a trainer."""

FILES: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "several_labels": lambda i: (f"{TEXTS[i % 4]} {i}", ["even", "odd"][: i % 3]),
    "numbers": lambda i: (f"{TEXTS[i % 4]} {i}", i / 5),
    "tags": lambda i: (TEXTS[i % 4].split()[:5], ["LABEL_0", "LABEL_2", "LABEL_1"] * 2),
}
"""The kind of the labels -> the text and the label of row i of a file."""


@pytest.mark.parametrize("kind", OTHER_TASKS)
def test_every_kind_of_labels_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    make, label, fields = OTHER_TASKS[kind]
    train = [{**row, "labels": label(i)} for i, row in enumerate(runs.label_rows())]
    train = [{name: value for name, value in row.items() if name != "label"} for row in train]
    posterior = saved(tmp_path, make(), train=train, **fields)
    rows = [dict(zip(("text", "label"), FILES[kind](i), strict=True)) for i in range(8)]
    if kind == "tags":
        rows = [{**row, "label": row["label"][: len(row["text"])]} for row in rows]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": row["text"][::-1]}) for row in rows[:5]))
    arguments = ["--posterior", posterior, "--test", str(tmp_path / "test.jsonl")]
    results = evaluate(tmp_path, *arguments, "--ood", f"backwards={tmp_path / 'other.jsonl'}")
    assert (results["kind"], results["members"]) == (kind, 2)
    assert results["rows"] == {"test": 8, "backwards": 5}
    assert all(0 <= area <= 1 for area in results["auroc"]["backwards"].values())
    assert f"{results['nll']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_adapters_trained_elsewhere_are_evaluated(tmp_path: Path, kind: str) -> None:
    model: Any = tiny_bert(num_labels=2, **CLASSES) if kind == "classes" else bert_tagger(torch.float32)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    for seed in range(2):
        adapted = with_lora(type(model).from_pretrained(tmp_path / "base"), seed=seed)
        adapted.save_pretrained(tmp_path / f"adapter{seed}")
    posterior = Posterior.from_adapters([tmp_path / f"adapter{seed}" for seed in range(2)])
    posterior.save_pretrained(tmp_path / "posterior")
    rows = [{"text": text.split()[:3], "label": ["LABEL_0", "LABEL_2", "LABEL_1"]} for text in TEXTS]
    if kind == "classes":
        rows = [{"text": f"{TEXTS[i % 4]} {i}", "label": ("even", "odd")[i % 2]} for i in range(8)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    head = {"labels": [model.config.id2label[index] for index in range(model.config.num_labels)]}
    recorded = dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, head=head))
    recorded.save_pretrained(tmp_path / "recorded")
    found, expected = (
        evaluate(tmp_path, "--posterior", str(tmp_path / name), "--test", str(tmp_path / "test.jsonl"))
        for name in ("posterior", "recorded")
    )
    assert found["members"] == 2
    assert (found["accuracy"], found["nll"]) == (expected["accuracy"], expected["nll"])
