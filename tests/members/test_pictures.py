from __future__ import annotations

import pickle
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bayes.members.pictures import (
    COUNTS,
    CountedImages,
    one_image_per_row,
    pictures_of,
    placeholders_of,
    take_pictures,
)
from tests.multimodal import IMAGE, illustrated


def test_images_follow_their_rows_by_placeholders() -> None:
    pixels = torch.arange(3.0).view(3, 1, 1, 1)
    found = take_pictures({"pixel_values": pixels}, torch.tensor([8, 0, 4]), torch.tensor([2, 0]))
    assert found["pixel_values"].flatten().tolist() == [2, 0, 1]
    grid = torch.tensor([[1, 2, 2], [1, 4, 2]])
    patches = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grid}
    found = take_pictures(patches, torch.tensor([1, 2]), torch.tensor([1, 1, 0]))
    assert found["pixel_values"].flatten().tolist() == [*range(4, 12), *range(4, 12), *range(4)]
    assert found["image_grid_thw"].tolist() == [[1, 4, 2], [1, 4, 2], [1, 2, 2]]


@pytest.mark.parametrize("name", ["image_sizes", "spatial_shapes"])
def test_images_of_several_sizes_follow_their_rows(name: str) -> None:
    """The rows hold the images [0], [1, 2] and [3], of 6, 2, 1 and 3 tokens."""
    sizes = torch.tensor([[8, 12], [4, 8], [4, 4], [4, 12]])
    pictures = {"pixel_values": torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 12), name: sizes}
    for row, own in enumerate([[0], [1, 2], [3]]):
        found = take_pictures(pictures, torch.tensor([6, 3, 3]), torch.tensor([row]))
        assert found["pixel_values"][:, 0, 0, 0].tolist() == own
        assert torch.equal(found[name], sizes[own])


@pytest.mark.parametrize("kind", ["crops", "newline tokens"])
def test_sizes_that_do_not_give_the_tokens_are_refused(kind: str) -> None:
    """An image in several crops, or with a token after each line, has other tokens than those of its area."""
    sizes = torch.tensor([[8, 12], [4, 8], [4, 4], [4, 12]])
    pixels = torch.zeros((4, 2, 3, 8, 12) if kind == "crops" else (4, 3, 8, 12))
    placeholders = torch.tensor([6, 3, 3] if kind == "crops" else [8, 5, 4])
    with pytest.raises(ValueError, match=r"3 rows has 4 images.* give each row one image"):
        take_pictures({"pixel_values": pixels, "image_sizes": sizes}, placeholders, torch.tensor([0]))


def test_images_of_one_size_have_equally_many_tokens() -> None:
    """Whatever the model makes of this size: crops, or tokens between lines."""
    pictures = {"pixel_values": torch.arange(3.0).view(3, 1, 1, 1, 1), "image_sizes": torch.tensor([[8, 12]] * 3)}
    found = take_pictures(pictures, torch.tensor([10, 5]), torch.tensor([1]))
    assert found["pixel_values"].flatten().tolist() == [2]


def test_the_only_row_has_all_images() -> None:
    pictures = {"pixel_values": torch.arange(2.0).view(2, 1, 1, 1, 1), "image_sizes": torch.tensor([[8, 8], [4, 8]])}
    found = take_pictures(pictures, torch.tensor([7]), torch.tensor([0, 0]))
    assert found["pixel_values"].flatten().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("placeholders", [[5, 1, 0], [12, 0, 0]], ids=["uneven", "padded lists of images"])
def test_images_of_unknown_rows_are_refused(placeholders: list[int]) -> None:
    pixels = torch.zeros((3, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"3 rows has 3 images.* give each row one image"):
        take_pictures({"pixel_values": pixels}, torch.tensor(placeholders), torch.tensor([0]))


def test_rows_without_an_image_have_no_pictures() -> None:
    pixels = torch.arange(3.0).view(3, 1, 1, 1)
    assert take_pictures({"pixel_values": pixels}, torch.tensor([8, 0, 4]), torch.tensor([1])) == {}
    padded = torch.tensor([[1.0, 2], [0, 0], [3, 0]]).view(3, 2, 1, 1, 1)
    pictures = {"pixel_values": padded, "pixel_attention_mask": torch.ones(3, 2, 1, 1)}
    assert take_pictures(pictures, torch.tensor([2, 0, 1]), torch.tensor([1, 1]), by_row=True) == {}
    found = take_pictures(pictures, torch.tensor([2, 0, 1]), torch.tensor([2, 1, 0, 0]), by_row=True)
    assert torch.equal(found["pixel_values"], padded[[2, 1, 0, 0]])
    assert len(found["pixel_attention_mask"]) == 4
    gray = {"pixel_values": torch.zeros(2, 1, 1, 1, 1)}  # an image may be zeros after normalisation
    assert list(take_pictures(gray, torch.tensor([1, 0]), torch.tensor([0]), by_row=True)) == ["pixel_values"]


@pytest.mark.parametrize(
    ("shape", "placeholders", "others", "expected"),
    [
        ((2, 3, 8, 8), [4, 4], (), True),
        ((2, 3, 8, 8), [8, 0], (), False),
        ((3, 3, 8, 8), [8, 4], (), False),
        ((2, 1, 3, 8, 8), [4, 4], ("pixel_attention_mask",), True),
        ((2, 2, 3, 8, 8), [8, 4], ("pixel_attention_mask",), False),
        ((2, 3, 8, 8), [4, 4], ("image_sizes",), False),
        ((8, 96), [1, 1], ("image_grid_thw",), False),
    ],
)
def test_a_row_has_one_image_that_a_model_reads_as_one_row(
    shape: tuple[int, ...], placeholders: list[int], others: tuple[str, ...], expected: bool
) -> None:
    pictures = {"pixel_values": torch.ones(shape), **{name: torch.ones(2, 2) for name in others}}
    assert one_image_per_row(pictures, torch.tensor(placeholders)) is expected
    pictures["pixel_values"][0] = 0  # models that read images by row take an image of zeros for none
    assert one_image_per_row(pictures, torch.tensor(placeholders)) is (expected and len(shape) != 5)


def test_pictures_are_found_by_name() -> None:
    assert set(pictures_of(illustrated("qwen2_vl"))) == {"pixel_values", "image_grid_thw"}


def batch_of(rows: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    """Images of these sizes in crops; image n of a row has n + 2 tokens, whatever its size."""
    ids = torch.zeros(len(rows), 12, dtype=torch.long)
    for row, own in enumerate(rows):
        ids[row, : sum(number + 2 for number in range(len(own)))] = IMAGE
    sizes = [size for own in rows for size in own]
    pixels = torch.zeros(len(sizes), 2, 3, 4, 4)
    return {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def test_images_are_counted_where_placeholders_do_not_tell() -> None:
    rows = [[(4, 8), (8, 8)], [(8, 4)], [(4, 8), (4, 8)]]
    found = CountedImages(batch_of, IMAGE)(rows)
    assert found[COUNTS].tolist() == [2, 1, 2]
    pictures, index = pictures_of(found), torch.tensor([2, 0])
    taken = take_pictures(pictures, placeholders_of(found["input_ids"], IMAGE), index, counts=found[COUNTS])
    assert taken["image_sizes"].tolist() == [[4, 8], [4, 8], [4, 8], [8, 8]]


@pytest.mark.parametrize("rows", [[[(4, 8)], [(8, 8)]], [[(4, 8), (8, 8)]]], ids=["one image each", "one row"])
def test_batches_that_show_their_rows_are_collated_once(rows: list[list[tuple[int, int]]]) -> None:
    calls = []
    found = CountedImages(lambda given: calls.append(given) or batch_of(given), IMAGE)(rows)
    assert COUNTS not in found
    assert calls == [rows]


def test_images_that_change_with_each_reading_are_not_counted() -> None:
    rows = [[(4, 8), (8, 8)], [(8, 4)], [(4, 8), (4, 8)]]

    def fewer(given: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
        """Read alone, a row has one image behind the same placeholders."""
        batch = batch_of(given)
        kept = 1 if len(given) == 1 else len(batch["pixel_values"])
        return batch | {name: value[:kept] for name, value in pictures_of(batch).items()}

    assert COUNTS not in CountedImages(fewer, IMAGE)(rows)


def test_rows_that_change_with_each_reading_are_not_counted() -> None:
    rows, calls = [[(4, 8), (8, 8)], [(8, 4)], [(4, 8)]], []

    def swapped(given: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
        """Read alone, the first row has one image, and the last one two: as many together."""
        calls.append(given)
        alone = {2: rows[2], 4: rows[0]}
        return batch_of([alone[len(calls)]] if len(calls) in alone else given)

    assert COUNTS not in CountedImages(swapped, IMAGE)(rows)
    assert len(calls) == 4


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_collator_may_take_entries_out_of_its_rows(kind: type) -> None:
    rows = [kind(images=images) for images in ([(4, 8), (8, 8)], [(8, 4)], [(4, 8), (4, 8)])]
    counted = CountedImages(lambda given: batch_of([row.pop("images") for row in given]), IMAGE)
    for _ in range(2):
        assert counted(rows)[COUNTS].tolist() == [2, 1, 2]


@pytest.mark.parametrize("form", [lambda ids: ids[:, None].repeat(1, 2, 1), lambda ids: ids.tolist()])
def test_ids_of_another_form_are_not_counted(form: Callable[[torch.Tensor], Any]) -> None:
    def given(rows: list[list[tuple[int, int]]]) -> dict[str, Any]:
        batch = batch_of(rows)
        return {**batch, "input_ids": form(batch["input_ids"])}

    assert COUNTS not in CountedImages(given, IMAGE)([[(4, 8), (8, 8)], [(8, 4)]])


@pytest.mark.parametrize("counts", [[2, 1], [1, 1, 1], [2, 1, 1, 1]])
def test_counts_that_are_not_those_of_the_batch_are_refused(counts: list[int]) -> None:
    batch = batch_of([[(4, 8), (8, 8)], [(8, 4)], [(4, 8), (4, 8)]])
    placeholders = placeholders_of(batch["input_ids"], IMAGE)
    with pytest.raises(ValueError, match="expected the numbers of images of 3 rows, 5 together"):
        take_pictures(pictures_of(batch), placeholders, torch.tensor([0]), counts=torch.tensor(counts))


def test_workers_of_a_loader_can_count_images() -> None:
    found = pickle.loads(pickle.dumps(CountedImages(batch_of, IMAGE)))
    assert found([[(4, 8), (8, 8)], [(8, 4)]])[COUNTS].tolist() == [2, 1]
