"""Each posterior of the table of single passes on real text makes each prediction, for a small model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, set_seed

from hf_bayes.cli.evaluation.classes import CLASS_CASE
from scripts.reproduce import single_pass_table_cells as cells
from scripts.reproduce.recommend_tasks import Task
from scripts.reproduce.single_pass_table_scores import scores


def rows(count: int, seed: int) -> Dataset:
    """Return rows whose label is the remainder of their first token."""
    ids = torch.randint(5, 50, (count, 6), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": [[1] * 6] * count, "labels": (ids[:, 0] % 3).tolist()}
    )


def model(seed: int):
    set_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    base = BertForSequenceClassification(config)
    set_seed(seed)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], layers_to_transform=[1])
    return get_peft_model(base, lora)


@pytest.fixture
def task(monkeypatch) -> Task:
    for name, value in {"STEPS": 40, "BATCH": 8, "PRIOR_ROWS": 12, "MEMBERS": (2, 3)}.items():
        monkeypatch.setattr(cells, name, value)
    # labels that are random want no spread at all, and a longer search would find that
    monkeypatch.setattr("hf_bayes.methods.laplace.heldout_prior.MAX_STEPS", 3)
    sets = {"train": rows(210, 1), "heldout": rows(70, 2), "test": rows(40, 3)}
    return Task(model, sets, {"other": rows(20, 4)}, CLASS_CASE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", cells.KINDS)
def test_each_prediction_of_a_posterior_is_scored(task, kind, tmp_path) -> None:
    first = cells.Cell(task, kind, 0, tmp_path, f"{kind}, 0")
    for cell in (first, cells.Cell(task, kind, 1, tmp_path, f"{kind}, 1", first)):
        for names, make in cells.WAYS.items():
            found = make(cell)
            assert tuple(found) == names
            for sets in found.values():
                assert 0 < scores(sets, cell.labels)["nll"] < 3  # log 3 is 1.1


def test_costs_are_relative_to_the_plain_encoder(task, tmp_path) -> None:
    found = cells.costs(cells.Cell(dataclasses.replace(task), "diagonal Laplace", 0, tmp_path, "one"), repeats=1)
    assert list(found) == ["mean network", "8 members", "32 members", "single pass"]
    assert min(found.values()) > 0
