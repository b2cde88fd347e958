from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.uncertainty.decomposition import predict
from tests.members.ranks import Ranks

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_local_sums_are_those_of_the_members() -> None:
    local, values = LocalMembers(), torch.tensor([[1.0], [3.0]]).log()
    torch.testing.assert_close(local.mean(values), values.mean(0))
    torch.testing.assert_close(local.log_mean_exp(values), torch.tensor([math.log(2.0)]))
    assert local.every(values) is values
    assert torch.equal(local.predict(LOGITS).log_probs, predict(LOGITS).log_probs)


@pytest.mark.parametrize("name", ["mean", "log_mean_exp", "every"])
def test_spread_sums_equal_those_of_one_process(ranks: Ranks, name: str) -> None:
    expected = getattr(LocalMembers(), name)(LOGITS)
    for found in ranks.run(lambda members, rank: getattr(members, name)(LOGITS[2 * rank : 2 * rank + 2])):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_spread_predictions_equal_those_of_one_process(ranks: Ranks) -> None:
    expected = predict(LOGITS)
    for found in ranks.run(lambda members, rank: members.predict(LOGITS[2 * rank : 2 * rank + 2])):
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.uncertainty.total, expected.uncertainty.total, rtol=1e-10, atol=0)
        torch.testing.assert_close(found.uncertainty.epistemic, expected.uncertainty.epistemic, rtol=1e-6, atol=1e-12)


def test_impossible_values_of_all_members_stay_impossible(ranks: Ranks) -> None:
    values = torch.tensor([[-math.inf, 0.0]]).double()
    for found in ranks.run(lambda members, rank: members.log_mean_exp(values)):
        assert found.tolist() == [-math.inf, 0.0]
