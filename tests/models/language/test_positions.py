from __future__ import annotations

import torch
from torch import nn

from hf_bayes.models.language.positions import numbered


class Positioned(nn.Module):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> None: ...


class Unpositioned(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> None: ...


def test_positions_count_from_the_first_token_of_each_row() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    found = numbered({"attention_mask": mask}, Positioned(), 0)
    assert found["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 1]]
    found = numbered({"attention_mask": mask}, Positioned(), 2)
    assert found["position_ids"].tolist() == [[2, 2, 2, 3], [2, 3, 4, 5], [2, 2, 3, 3]]


def test_other_inputs_keep_what_the_model_does() -> None:
    left, right = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 1, 0]])
    own = {"attention_mask": left, "position_ids": torch.tensor([[7, 8, 9]])}
    for inputs in ({}, {"attention_mask": right}, {"attention_mask": left[:, None]}, own):
        assert numbered(inputs, Positioned(), 0) is inputs
    inputs = {"attention_mask": left}
    assert numbered(inputs, Unpositioned(), 0) is inputs
