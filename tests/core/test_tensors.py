from __future__ import annotations

import torch

from hf_bayes.core.tensors import joined, tensors_in, with_tensors

BATCH = {"input_ids": torch.ones(2, 3), "labels": torch.zeros(2), "names": ["a", "b"], "length": 3}


def test_tensors_in_a_batch_leave_other_values_out() -> None:
    assert list(tensors_in(BATCH)) == ["input_ids", "labels"]


def test_only_the_tensors_of_a_batch_change() -> None:
    found = with_tensors(BATCH, lambda tensor: tensor + 1)
    assert list(found) == list(BATCH)
    assert torch.equal(found["labels"], torch.ones(2))
    assert found["names"] is BATCH["names"]
    assert torch.equal(BATCH["labels"], torch.zeros(2))


def test_pieces_are_joined_by_name_and_one_is_not_copied() -> None:
    one, two = {"total": torch.ones(2)}, {"total": torch.zeros(1)}
    assert joined([one])["total"] is one["total"]
    assert joined([one, two])["total"].tolist() == [1, 1, 0]
