"""The choice of rows to label."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import BayesianModelForSequenceClassification, attach
from hf_bayes.decide import acquisition
from hf_bayes.decide.acquisition import RULES, acquire, select_rows
from hf_bayes.uncertainty.custom.weighted import Weighted
from hf_bayes.uncertainty.decomposition import decompose
from tests import runs
from tests.fit.distilled import ensemble
from tests.pipelines.built import bayesian
from tests.tiny_models import tiny_bert


def logits(num_rows: int = 6, num_classes: int = 3, num_members: int = 4) -> Tensor:
    return 2 * torch.randn(num_members, num_rows, num_classes, generator=torch.Generator().manual_seed(0)).double()


def information(probs: Tensor, rows: tuple[int, ...]) -> float:
    """Return the mutual information of the labels of ``rows`` and the member, by all configurations of labels."""
    joint = torch.stack(
        [
            torch.stack([probs[:, row, label] for row, label in zip(rows, labels, strict=True)]).prod(0)
            for labels in itertools.product(range(probs.shape[-1]), repeat=len(rows))
        ]
    )
    return float(torch.special.entr(joint.mean(1)).sum() - torch.special.entr(joint).sum(0).mean())


def test_entropy_and_bald_order_rows_by_total_and_epistemic() -> None:
    parts = decompose(logits())
    assert select_rows(logits(), 6, by="entropy") == parts.total.argsort(descending=True).tolist()
    assert select_rows(logits(), 2, by="bald") == parts.epistemic.argsort(descending=True)[:2].tolist()


def test_batchbald_is_greedy_in_the_joint_information() -> None:
    probs, expected = logits().softmax(-1), ()
    for _ in range(3):
        rest = [(*expected, row) for row in range(6) if row not in expected]
        expected = max(rest, key=lambda rows: information(probs, rows))
    assert select_rows(logits(), 3, by="batchbald") == list(expected)


def test_batchbald_does_not_choose_a_row_and_its_copy() -> None:
    values = logits(num_members=16)
    first = select_rows(values, 1, by="bald")[0]
    copied = torch.cat([values[:, [first]], values], 1)
    assert set(select_rows(copied, 2, by="bald")) == {0, first + 1}  # this one does
    assert set(select_rows(copied, 2, by="batchbald")) != {0, first + 1}


def test_drawn_configurations_estimate_the_same_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = logits().softmax(-1)
    exact = torch.einsum("am,bm,cm->abcm", *(probs[:, row].T for row in range(3))).flatten(0, 2)
    ones = torch.ones(len(exact), dtype=probs.dtype)
    monkeypatch.setattr(acquisition, "_MAX_JOINT", 26)
    generator = torch.Generator().manual_seed(0)
    drawn = [acquisition._thinned(exact, ones, generator) for _ in range(500)]
    found = torch.stack([acquisition._joint_entropy(*each, probs) for each in drawn])
    error = found.std(0) / 500**0.5
    expected = acquisition._joint_entropy(exact, ones, probs)
    assert ((found.mean(0) - expected).abs() < 4 * error).all()
    # the broken twin: equal weights for configurations that are drawn by their probability
    equal = torch.stack([acquisition._joint_entropy(joint, ones[:26], probs) for joint, _ in drawn])
    assert ((equal.mean(0) - expected).abs() > 4 * error).any()


def test_rows_are_chosen_from_the_predictions_of_a_model() -> None:
    model: Any = bayesian("bert")
    pool = [{name: value for name, value in row.items() if name != "label"} for row in runs.label_rows(12, seed=3)]
    with torch.no_grad():
        inputs = {name: torch.tensor([row[name] for row in pool]) for name in pool[0]}
        expected = model(**inputs).epistemic.argsort(descending=True)[:4].tolist()
    assert acquire(model, pool, 4, by="bald", batch_size=5) == expected
    for by in RULES:
        found = acquire(model, pool, 4, by=by, generator=torch.Generator().manual_seed(1))
        assert len(set(found)) == 4
        assert set(found) <= set(range(12))


def test_weights_of_rows_are_not_read() -> None:
    rows = [{name: value for name, value in row.items() if name != "label"} for row in runs.label_rows(8, seed=3)]
    chosen = []
    for likelihood in (Weighted(), None):
        with attach(tiny_bert(), num_members=3, subspace="last_layer", likelihood=likelihood) as model:
            noise = torch.randn(model.theta.shape, generator=torch.Generator().manual_seed(1))
            model.theta.data += 0.3 * noise
            pool = rows if likelihood is None else [{**row, "weight": 2.0} for row in rows]
            chosen.append(acquire(model, pool, 4))
            assert chosen[-1] == acquire(model, rows, 4)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("by", ["bald", "batchbald"])
def test_one_member_has_no_disagreement_to_rank_by(by: Any) -> None:
    with pytest.raises(ValueError, match=f"by='{by}' .* at least 2 members, got 1: .*by='entropy'"):
        select_rows(logits(num_members=1), 2, by=by)
    load = BayesianModelForSequenceClassification.from_pretrained
    with load(ensemble("classes"), base_model=tiny_bert(), members=1) as network:
        for pool in (runs.label_rows(4), [{"wrong": 1}] * 4):  # before the first forward pass
            with pytest.raises(ValueError, match="sort the rows by the `epistemic` that it returns"):
                acquire(network, pool, 2, by=by)
    total = decompose(logits(num_members=1)).total
    assert select_rows(logits(num_members=1), 6, by="entropy") == total.argsort(descending=True).tolist()


def test_what_cannot_be_chosen_is_refused() -> None:
    for pool, words in (([], "pool has 0 rows; acquire needs some"), (None, "got NoneType")):
        with pytest.raises(ValueError, match=words):
            acquire(bayesian("bert"), pool, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"an integer from 1 to the pool's 6, got 7"):
        select_rows(logits(), 7)
    with pytest.raises(ValueError, match="unknown rule 'margin': expected one of bald, batchbald"):
        select_rows(logits(), 2, by="margin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a Bayesian classifier with one class for each input"):
        acquire(bayesian(), [{}], 1)  # type: ignore[arg-type]
