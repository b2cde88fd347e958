"""Rows of two texts through a model with one output."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.models.input_check import InputCheck
from hf_bayes.models.text_pairs import GroupCheck, flattened, grouped, holds_groups
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from tests.tiny_models import tiny_bert

IDS = torch.randint(3, 300, (3, 2, 5), generator=torch.Generator().manual_seed(0))


def test_the_texts_of_a_row_lie_side_by_side() -> None:
    flat = flattened({"input_ids": IDS, "note": "kept"})
    assert torch.equal(flat["input_ids"][2], IDS[1, 0])
    assert torch.equal(flat["input_ids"][3], IDS[1, 1])
    assert flat["note"] == "kept"
    assert grouped(torch.arange(6.0).view(1, 6, 1), 2).tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert holds_groups({"input_ids": IDS})
    assert not holds_groups({"input_ids": IDS[0]})


def test_a_pair_has_the_rewards_of_its_texts() -> None:
    model = tiny_bert(num_labels=1)
    with attach(model, num_members=3, subspace="last_layer", likelihood=BradleyTerry()) as bayesian:
        bayesian.theta.data += torch.randn_like(bayesian.theta)
        pairs = bayesian.member_logits({"input_ids": IDS})  # type: ignore[operator]
        singles = bayesian.member_logits({"input_ids": IDS.flatten(0, 1)})  # type: ignore[operator]
        # the same float32 sums, in batches of another size
        assert torch.allclose(pairs, singles[..., 0].view(3, 3, 2), atol=1e-6)
        output = bayesian(input_ids=IDS, labels=torch.tensor([0, 1, 0]))
        expected = pairs.log_softmax(-1).exp().mean(0).log()
        assert torch.allclose(output.logits, expected, atol=1e-6)
        assert torch.allclose(output.loss, -expected[[0, 1, 2], [0, 1, 0]].mean(), atol=1e-6)


def test_single_texts_have_a_mean_and_a_deviation() -> None:
    with attach(tiny_bert(num_labels=1), num_members=3, subspace="last_layer", likelihood=BradleyTerry()) as bayesian:
        bayesian.theta.data += torch.randn_like(bayesian.theta)
        rewards = bayesian.member_logits({"input_ids": IDS[:, 0]})  # type: ignore[operator]
        output = bayesian(input_ids=IDS[:, 0])
        assert torch.allclose(output.logits, rewards.mean(0))
        assert torch.allclose(output.epistemic_std, rewards.std(0, correction=0))
        assert output.total is None
        with pytest.raises(ValueError, match="single texts, whose outputs are rewards"):
            bayesian(input_ids=IDS[:, 0], labels=torch.zeros(3, dtype=torch.long))


def test_inputs_of_pairs_are_checked_text_by_text() -> None:
    check = GroupCheck(InputCheck(tiny_bert(num_labels=1)), 2)
    check({"input_ids": IDS})
    wrong = IDS.clone()
    wrong[1, 1, 0] = 10_000
    with pytest.raises(ValueError, match="row 3 of the texts of train_dataset has the token id 10000"):
        check({"input_ids": wrong}, where="train_dataset")
    with pytest.raises(ValueError, match="has 3 texts, expected 2"):
        check({"input_ids": torch.ones(2, 3, 4, dtype=torch.long)})
