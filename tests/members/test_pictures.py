from __future__ import annotations

import pytest
import torch

from hf_bayes.members.pictures import pictures_of, take_pictures
from tests.multimodal import illustrated


def test_images_follow_their_rows_by_placeholders() -> None:
    pixels = torch.arange(3.0).view(3, 1, 1, 1)
    found = take_pictures({"pixel_values": pixels}, torch.tensor([8, 0, 4]), torch.tensor([2, 0]))
    assert found["pixel_values"].flatten().tolist() == [2, 0, 1]
    grid = torch.tensor([[1, 2, 2], [1, 4, 2]])
    patches = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grid}
    found = take_pictures(patches, torch.tensor([1, 2]), torch.tensor([1, 1, 0]))
    assert found["pixel_values"].flatten().tolist() == [*range(4, 12), *range(4, 12), *range(4)]
    assert found["image_grid_thw"].tolist() == [[1, 4, 2], [1, 4, 2], [1, 2, 2]]


@pytest.mark.parametrize("placeholders", [[5, 1, 0], [12, 0, 0]], ids=["uneven", "padded lists of images"])
def test_images_of_unknown_rows_are_refused(placeholders: list[int]) -> None:
    pixels = torch.zeros((3, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"3 rows has 3 images.* give each row one image"):
        take_pictures({"pixel_values": pixels}, torch.tensor(placeholders), torch.tensor([0]))


def test_pictures_are_found_by_name() -> None:
    assert set(pictures_of(illustrated("qwen2_vl"))) == {"pixel_values", "image_grid_thw"}
