from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from hf_bayes import EnsembleConfig, MAPConfig
from hf_bayes.cli.evaluation.classes import CLASS_CASE
from hf_bayes.training.tuning.candidates import Candidate
from scripts.reproduce import tune
from scripts.reproduce.recommend_tasks import Task
from tests.tiny_models import tiny_bert


@pytest.fixture
def task(tmp_path: Path) -> Task:
    torch.manual_seed(0)
    tiny_bert(num_labels=3).save_pretrained(tmp_path)

    def model(_: int) -> PeftModel:
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))

    def rows(count: int, seed: int) -> Dataset:
        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 30, (count, 8), generator=chance)
        labels = ids[:, 0] % 3
        return Dataset.from_dict({
            "input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": labels.tolist()
        })  # fmt: skip

    sets = {"train": rows(64, 0), "heldout": rows(200, 1), "test": rows(30, 2)}
    return Task(model, sets, {}, CLASS_CASE, batch=8, gradients=60)


def test_test_rows_judge_the_finalists(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [
        Candidate("plain fine-tuning", MAPConfig(), 1e-3, 1),
        Candidate("deep ensemble", EnsembleConfig(num_chains=2), 1e-3, 2),
        Candidate("too fast", MAPConfig(), 1e30, 1),
    ]
    monkeypatch.setattr(tune, "default_candidates", candidates)
    found = tune.run(task)
    methods = [run["method"] for run in found["finalists"]]
    assert found["chosen"] in methods
    shortest = min(run["gradients"] for run in found["finalists"])
    assert found["gradients"] == sum(run["gradients"] for run in found["first"]) + sum(
        run["gradients"] for run in found["finalists"] if run["gradients"] > shortest
    )
    for run in (run for run in found["finalists"] if "failure" not in run):
        assert sum(run["rows"]) / 30_000 == pytest.approx(run["nll"], abs=1e-3)  # kept to a thousandth
    tables = tune.blocks({"tasks": {"debian_last": found}})
    assert tables["debian_last"].count("(chosen)") == 1
    assert all(method in tables["debian_last"] for method in ("plain fine-tuning", "deep ensemble", "too fast"))
    assert tables["debian_last"].count("deep ensemble") == 2  # a run of each round
    assert "too fast | failed" in tables["debian_last_first"]
