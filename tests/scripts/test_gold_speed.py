"""The speed of chains on the LoRA with a gold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.reproduce import gold_speed
from scripts.reproduce.gold_chains import Gold
from scripts.reproduce.gold_speed import PAGE, SEEDED, SPEEDS, blocks, figures, speed
from scripts.reproduce.report import RESULTS
from tests.scripts.test_golds import small_lora


def test_a_speed_has_an_rhat_for_each_number_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = small_lora()
    monkeypatch.setattr(gold_speed, "BATCH", 1)  # 8 updates an epoch
    dim = gold_speed.Energy.of(rows).logits.layout.dim
    start = 0.1 * torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    gold = Gold(torch.full((4, 3), 1 / 3), torch.ones(4), {})
    found = speed(rows, gold, start, {"heating": 0.3}, epochs=10)
    assert found["epochs"] == [5, 10]
    assert min(found["rhat"]) > 0.99
    assert 0 < found["epochs_per_draw"][0] <= found["epochs_per_draw"][1]


def test_the_page_has_all_runs(tmp_path: Path) -> None:
    record = json.loads((RESULTS / f"{PAGE}.json").read_text())
    assert record["speeds"].keys() == SPEEDS.keys()
    assert record["seeds"].keys() == SEEDED.keys()
    assert set(blocks(record)) == {"speeds", "seeds"}
    figures(record, tmp_path)
    assert (tmp_path / f"{PAGE}.png").exists()
