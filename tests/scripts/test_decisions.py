"""The experiments on decisions, on a few made-up rows."""

from __future__ import annotations

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


def test_a_curve_has_an_accuracy_for_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_POOL": 40, "NUM_TEST": 40, "NUM_ROUNDS": 3, "BATCH": 5, "NUM_MEMBERS": 3}.items():
        monkeypatch.setattr(active_learning, name, value)
    labels = torch.arange(90) % 3
    features = torch.randn(90, 4) + 2 * torch.nn.functional.one_hot(labels, 4)
    curves = {by: [active_learning.curve(features, labels, by, seed=0)] for by in RULES}
    assert {len(found[0]) for found in curves.values()} == {3}
    assert len({found[0][0] for found in curves.values()}) == 1  # the first rows are the same
    page = active_learning.blocks({"labels": [5, 10, 15], "curves": {"a task": curves}})["curves"]
    assert "| a task | random |" in page
    assert active_learning.labels_needed([0.1, 0.5, 0.6], 0.5, [5, 10, 15]) == 10
    assert active_learning.labels_needed([0.1], 0.5, [5]) is None
