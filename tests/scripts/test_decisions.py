"""The experiments on decisions, on a few made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bayes.decide.acquisition import RULES
from scripts.reproduce import active_learning, decisions


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    for name, value in {"NUM_HELDOUT": 120, "NUM_MEMBERS": 3, "NUM_SPLITS": 2}.items():
        monkeypatch.setattr(decisions, name, value)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    features = torch.randn(300, 4, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 4)
    unknown = torch.randn(20, 4, generator=generator), torch.full((20,), -1)
    return {
        "train": (features[:60], labels[:60]),
        "other": (features[60:], labels[60:]),
        "out of scope": unknown,
    }


def test_the_page_of_decisions_is_made_from_its_record(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "rows", lambda: parts)
    monkeypatch.setattr(decisions, "ERROR_RATES", (0.3,))
    sample = decisions.members
    monkeypatch.setattr(decisions, "members", lambda *rows: sample(*rows, num_steps=60))
    record = decisions.run()
    assert len(record["sets"]["lac 0.9"]["coverage"]) == 2
    assert set(record["scores"]) == {"known", "with out of scope"}
    curve = record["scores"]["known"]["mixture: total (the order of its perplexity)"]
    assert curve["accuracy"][0] == pytest.approx(record["accuracy"], abs=0.15)  # other rows of the same law
    assert all(table.startswith("| ") for table in decisions.blocks(record).values())


def test_a_curve_has_an_accuracy_for_each_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "NUM_POOL": 40,
        "NUM_TEST": 40,
        "NUM_ROUNDS": 3,
        "BATCH": 5,
        "NUM_CHAINS": 2,
        "NUM_STEPS": 20,
    }.items():
        monkeypatch.setattr(active_learning, name, value)
    labels = torch.arange(90) % 3
    features = torch.randn(90, 4) + 2 * torch.nn.functional.one_hot(labels, 4)
    curves = {by: [active_learning.curve(features, labels, by, seed) for seed in range(2)] for by in RULES}
    assert {len(found[0]) for found in curves.values()} == {3}
    assert len({found[0][0] for found in curves.values()}) == 1  # the first rows are the same
    page = active_learning.blocks({"labels": [5, 10, 15], "curves": {"a task": curves}})["curves"]
    assert "| a task | random |" in page
    active_learning.figures({"labels": [5, 10, 15], "curves": {"a task": curves}}, tmp_path)
    assert (tmp_path / "active_learning.png").stat().st_size > 10_000


def test_saved_labels_are_counted_where_both_rules_arrive() -> None:
    labels, slow, fast = [10, 20, 30], [0.1, 0.3, 0.5], [0.1, 0.5, 0.6]
    assert active_learning.labels_saved(fast, slow, labels) == pytest.approx(10)  # 0.5 at 20 labels in place of 30
    assert active_learning.labels_saved(slow, fast, labels) == pytest.approx(-10)  # random selection is ahead
    assert active_learning.labels_saved(slow, slow, labels) == 0
    assert active_learning.labels_needed([0.1, 0.3, 0.2], 0.2, labels) == pytest.approx(15)


def test_a_rule_is_better_only_beyond_the_noise_of_seeds() -> None:
    assert active_learning.verdict([0.10, 0.11, 0.09]) == "the rule"
    assert active_learning.verdict([-0.10, -0.11, -0.09]) == "random"
    assert active_learning.verdict([0.10, -0.11, 0.09]) == "no clear difference"
