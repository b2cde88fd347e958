"""The regressions with nothing set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from hf_bayes import MAPConfig
from scripts.reproduce import regression
from tests.tiny_models import tiny_bert


@pytest.fixture
def sets() -> dict[str, Dataset]:
    """Rows whose label is nearly the number of a token among the first four."""
    chance, made = torch.Generator().manual_seed(0), {}
    for name, count in {"train": 64, "heldout": 60, "test": 30}.items():
        ids = torch.randint(5, 30, (count, 8), generator=chance)
        labels = (ids[:, :4] > 17).sum(1) - 2.0 + 0.3 * torch.randn(count, generator=chance)
        made[name] = Dataset.from_dict({
            "input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": labels.tolist()
        })  # fmt: skip
    return made


def test_runs_are_kept_and_not_made_again(
    sets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    noises: list[object] = []
    run = regression.run

    def seen(*given: object) -> dict[str, object]:
        noises.append(given[-1])
        return run(*given)  # type: ignore[arg-type]

    def model(seed: int) -> object:
        made.append(seed)
        torch.manual_seed(seed)
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
        return get_peft_model(tiny_bert(num_labels=1), lora)

    monkeypatch.setattr(regression, "UPDATES", 40)
    monkeypatch.setattr(regression, "METHODS", {regression.PLAIN: MAPConfig(), "nothing set": None})
    monkeypatch.setattr(regression, "DRAWN", ("nothing set",))
    monkeypatch.setattr(regression, "rows_of", lambda target: sets)
    monkeypatch.setattr(regression, "model_of", model)
    monkeypatch.setattr(regression, "run", seen)
    path = tmp_path / "regression.json"
    args = regression.Arguments(targets=["length"], seeds=1)
    record = regression.experiment(args, path)
    assert made == [0] * 3
    assert noises == [None, None, record["runs"][0]["heldout_rmse"]]
    plain, own, given = record["runs"]
    assert plain["noise_std"] == pytest.approx(plain["heldout_rmse"], rel=1e-3)  # of one network
    assert given["noise_std"] == plain["heldout_rmse"]
    assert own["noise_std"] != own["noise_std_of_run"]
    assert regression.experiment(args, path) == json.loads(path.read_text()) == record
    assert made == [0] * 3
    lines = regression.blocks({"runs": record["runs"]})["length"].splitlines()
    assert {line.split(" | ")[0] for line in lines[2:]} == {
        f"| {name}" for name in (regression.PLAIN, "nothing set", "nothing set, noise given")
    }
    assert regression.blocks(record)["size"].count("\n") == 1  # no runs
