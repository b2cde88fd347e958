from __future__ import annotations

import pytest
import torch

from hf_bayes.members.inputs import num_positions_of, num_rows_of, padding_mask, repeat_rows, take_rows, without_labels


def test_rows_are_repeated_member_by_member_in_tensors_and_dicts() -> None:
    ids = torch.tensor([[1], [2]])
    folded = repeat_rows({"input_ids": ids, "masks": {"full": ids}, "one": torch.ones(1, 3), "flag": True}, 2, 3)
    assert folded["input_ids"].flatten().tolist() == [1, 2, 1, 2, 1, 2]
    assert folded["masks"]["full"].shape == (6, 1)
    assert folded["one"].shape == (1, 3)
    assert folded["flag"] is True


@pytest.mark.parametrize("num_rows", [3, 4])
def test_positions_on_several_axes_are_cut_by_rows(num_rows: int) -> None:
    positions = torch.arange(3 * num_rows * 2).reshape(3, num_rows, 2)  # with 3 rows, the axes are as many
    inputs = {"input_ids": positions[0], "position_ids": positions, "masks": {"full": positions[0]}, "flag": True}
    found = take_rows(inputs, torch.tensor([2, 0, 2]))
    assert torch.equal(found["position_ids"], positions[:, [2, 0, 2]])
    assert torch.equal(found["masks"]["full"], positions[0, [2, 0, 2]])
    assert found["flag"] is True
    folded = repeat_rows(inputs, num_rows, 2)
    assert torch.equal(folded["position_ids"], torch.cat([positions, positions], 1))


def test_other_positions_follow_the_common_rule() -> None:
    pairs = torch.arange(2 * 2 * 5).reshape(2, 2, 5)
    found = take_rows({"input_ids": pairs, "position_ids": pairs}, torch.tensor([1]))
    assert torch.equal(found["position_ids"], pairs[1:])
    shared = torch.zeros(3, 1, 5)  # for every row
    for rows in (2, 3):  # as many as axes
        inputs = {"input_ids": torch.zeros(rows, 5), "position_ids": shared}
        assert take_rows(inputs, torch.tensor([1]))["position_ids"] is shared
        assert repeat_rows(inputs, rows, 2)["position_ids"] is shared


def test_rows_and_positions_are_those_of_the_main_input() -> None:
    inputs = {"attention_mask": torch.ones(7, 9), "input_ids": torch.ones(2, 5)}
    assert (num_rows_of(inputs), num_positions_of(inputs)) == (2, 5)
    with pytest.raises(ValueError, match="no tensor among the model's inputs"):
        num_rows_of({"flag": True})


def test_labels_of_any_name_and_their_columns_are_no_inputs() -> None:
    batch = {"input_ids": 1, "labels": 2, "label": 3, "label_ids": 4, "weight": 5, "labels_mask": 6}
    assert without_labels(batch) == {"input_ids": 1, "weight": 5, "labels_mask": 6}
    assert without_labels(batch, ("weight",)) == {"input_ids": 1, "labels_mask": 6}


def test_only_a_mask_of_two_dimensions_shows_padding() -> None:
    mask = torch.ones(2, 5)
    assert padding_mask({"attention_mask": mask}) is mask
    for other in (None, [[1, 1]], torch.ones(2, 1, 5, 5)):
        assert padding_mask({"attention_mask": other}) is None
    assert padding_mask({}) is None
