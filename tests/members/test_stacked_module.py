from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.members.context import Context
from hf_bayes.members.stacked_module import Stacked


def test_a_frozen_parameter_is_the_same_for_all_members() -> None:
    context = Context()
    context.num_members = 3
    layer = nn.Linear(2, 2)
    stacked = Stacked(layer, {"weight": "w"}, context)
    assert torch.equal(stacked.tensor("bias"), layer.bias.detach().expand(3, 2))
    with pytest.raises(RuntimeError, match="w is random: call the BayesianModel that holds this model"):
        stacked.tensor("weight")


def test_a_batch_that_cannot_be_dealt_to_members_is_refused() -> None:
    context = Context()
    context.num_members = 3
    context.begin(2, 1, trunk=False)
    stacked = Stacked(nn.Linear(2, 2), {"weight": "the.name"}, context)
    named = r"the\.name: its module was called with 5 rows, expected 6 \(3 members x 2\).*model\.members_per_pass = 1"
    with pytest.raises(ValueError, match=named):
        stacked.require_member_rows(torch.zeros(5, 2), also=2)


def test_rows_of_no_member_are_refused_once_members_differ() -> None:
    context = Context()
    context.num_members = 3
    context.begin(1, 4, trunk=False)
    stacked = Stacked(nn.Linear(2, 2), {"weight": "the.name"}, context)
    table = torch.zeros(1, 8, 2)
    assert stacked.single(table) is table
    context.fanned_out = True
    with pytest.raises(ValueError, match=r"with 1 rows, expected 3 .*\(experts, windows or patches of an image\)"):
        stacked.single(table)
