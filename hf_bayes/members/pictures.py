"""Images of a batch with text: the assignment of images to rows.

Models that read images and text take the images of all rows one after another. A row of ``input_ids`` has placeholder
tokens in the places of its images, and the number of its images follows from its placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.tensors import tensors_in

PICTURES = ("pixel_values", "pixel_attention_mask", "pixel_mask", "image_sizes", "image_grid_thw", "spatial_shapes")
"""Names of inputs whose first dimension is images, patches of images, or rows with one image each."""

COUNTS = "images_per_row"
"""The name of the input [B] that says how many images (or crops) each row of a batch has."""


class CountedImages:
    """A collator that adds ``images_per_row`` to a batch that does not show which images belong to which row.

    Each row of such a batch is collated alone once more, to count its images. A row whose images differ each time may
    then have another number of images: the batch stays as it is if images or placeholders of a row do not fit.

    Args:
        collate: rows -> a batch. It may change the entries of its rows, which are copied for each call.
        image_token: the token id of an image's placeholder.
    """

    def __init__(self, collate: Callable[..., Any], image_token: int | None) -> None:
        self.collate, self.image_token = collate, image_token

    def __call__(self, rows: Sequence[Any]) -> Any:
        batch = self.collate([_copied(row) for row in rows])
        placeholders = self._placeholders(batch)
        if COUNTS in batch or placeholders is None or len(placeholders) != len(rows):
            return batch
        pictures = pictures_of(batch)
        if not shows_owners(pictures, placeholders):
            counts = self._counts(rows, placeholders)
            if counts is not None and sum(counts) == _num_images(pictures):
                batch[COUNTS] = torch.tensor(counts)
        return batch

    def _placeholders(self, batch: Any) -> Tensor | None:
        """Return [B], the placeholders of each row; None for a batch without images, or with ids of another form."""
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not pictures_of(batch):
            return None
        return placeholders_of(ids, self.image_token)

    def _counts(self, rows: Sequence[Any], placeholders: Tensor) -> list[int] | None:
        """Return the number of images of each row, read alone; None if a row has other ``placeholders`` then."""
        found = [self.collate([_copied(row)]) for row in rows]
        alone = torch.cat([placeholders_of(batch["input_ids"], self.image_token) for batch in found])
        return [_num_images(pictures_of(batch)) for batch in found] if torch.equal(alone, placeholders) else None


def _copied(row: Any) -> Any:
    """Return a row whose entries can be replaced, or taken out, without a change of ``row``."""
    return copy(row) if isinstance(row, MutableMapping) else row


def placeholders_of(input_ids: Tensor, image_token: int | None) -> Tensor:
    """Return [B], the number of placeholder tokens of images in each row."""
    return input_ids.eq(image_token).sum(1)  # type: ignore[arg-type]


def pictures_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of a batch that hold images."""
    tensors = tensors_in(inputs)
    return {name: tensors[name] for name in PICTURES if name in tensors}


def one_image_per_row(pictures: dict[str, Tensor], placeholders: Tensor) -> bool:
    """Return whether each row of a batch has one image, which a model reads as one row of an input of its own.

    Args:
        pictures, placeholders: as in ``take_pictures``.
    """
    if set(pictures) - {"pixel_values", "pixel_attention_mask"}:
        return False  # images of several sizes: patches of all images in one row, or a number of crops
    pixels, num_rows = pictures["pixel_values"], len(placeholders)
    alone = len(pixels) == num_rows
    if pixels.ndim == 5:  # [B, images, ...], from which models drop images of zeros
        alone = pixels.shape[:2] == (num_rows, 1) and bool(pixels.flatten(1).any(1).all())
    return alone and bool((placeholders > 0).all())


def shows_owners(pictures: dict[str, Tensor], placeholders: Tensor, *, by_row: bool = False) -> bool:
    """Return whether a batch shows which images belong to which row; arguments as of ``take_pictures``."""
    if by_row and _num_images(pictures) == len(placeholders):
        return True
    try:
        _owners(pictures, placeholders.cpu())
    except ValueError:
        return False
    return True


def take_pictures(
    pictures: dict[str, Tensor],
    placeholders: Tensor,
    index: Tensor,
    *,
    by_row: bool = False,
    counts: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the images of some rows of a batch, in the order of these rows; nothing if these rows have none.

    Args:
        pictures: the result of ``pictures_of`` for the batch.
        placeholders: [B] the number of placeholder tokens in each row of the batch.
        index: [k] row numbers; a row may occur several times.
        by_row: True if the model reads images as [B, images, ...], with zeros where a row has fewer images.
        counts: [B] the number of images of each row, where the batch says it; None finds it from the placeholders.
    Raises:
        ValueError: if the batch does not show which images belong to which row.
    """
    num_images, num_rows = _num_images(pictures), len(placeholders)
    if by_row and num_images == num_rows:
        own = {name: value[index.to(value.device)] for name, value in pictures.items()}
        return own if bool((placeholders > 0)[index.to(placeholders.device)].any()) else {}
    index, patches = index.cpu(), _patches(pictures)
    owners = _owners(pictures, placeholders.cpu()) if counts is None else _counted(num_images, counts.cpu(), num_rows)
    images = torch.cat([(owners == row).nonzero()[:, 0] for row in index.tolist()])
    offsets = patches.cumsum(0) - patches
    if len(images) == 0:
        return {}  # a model cannot read a tensor of no images
    pieces = [torch.arange(int(offsets[image]), int(offsets[image] + patches[image])) for image in images.tolist()]
    by_patch = torch.cat(pieces)
    found = {}
    for name, value in pictures.items():
        if len(value) not in (num_images, int(patches.sum())):
            raise ValueError(_unknown(len(value), num_rows))
        found[name] = value[(images if len(value) == num_images else by_patch).to(value.device)]
    return found


def _owners(pictures: dict[str, Tensor], placeholders: Tensor) -> Tensor:
    """Return the row of each image, [images].

    Raises:
        ValueError: if the batch does not show which images belong to which row.
    """
    has_grid, num_images, num_rows = "image_grid_thw" in pictures, _num_images(pictures), len(placeholders)
    if num_rows == 1:
        return torch.zeros(num_images, dtype=torch.long)
    if not has_grid and num_images == num_rows and bool((placeholders > 0).all()):
        return torch.arange(num_rows)  # one image per row
    areas = _patches(pictures) if has_grid else _areas(pictures, num_images, num_rows)
    owners = _owners_by_area(areas, placeholders)
    # five dimensions: rows may be padded to the largest number of images of a row
    if not has_grid and num_images == num_rows and next(iter(pictures.values())).ndim == 5:
        raise ValueError(_unknown(num_images, num_rows))
    return owners


def _counted(num_images: int, counts: Tensor, num_rows: int) -> Tensor:
    """Return the row of each image, [images], from the number of images of each row.

    Raises:
        ValueError: if these are not the numbers of the batch.
    """
    if counts.shape != (num_rows,) or int(counts.sum()) != num_images:
        raise ValueError(
            f"{COUNTS} is {counts.tolist()}, expected the numbers of images of {num_rows} rows, {num_images} together"
        )
    return torch.arange(num_rows).repeat_interleave(counts)


def _num_images(pictures: dict[str, Tensor]) -> int:
    """Return the number of images of a batch (or of their crops, where these follow each other); 0 without any."""
    return len(pictures.get("image_grid_thw", next(iter(pictures.values())))) if pictures else 0


def _patches(pictures: dict[str, Tensor]) -> Tensor:
    """Return [images], the number of rows of ``pixel_values`` that each image takes."""
    grid = pictures.get("image_grid_thw")
    return torch.ones(_num_images(pictures), dtype=torch.long) if grid is None else grid.prod(-1).cpu()


def _areas(pictures: dict[str, Tensor], num_images: int, num_rows: int) -> Tensor:
    """Return [images], in any unit, the areas of images that have no grid; 1 if all have the same size.

    Raises:
        ValueError: if the images have several sizes, and each consists of several crops: the number of tokens of an
            image is then not proportional to its area.
    """
    sizes = next((pictures[name] for name in ("image_sizes", "spatial_shapes") if name in pictures), None)
    if sizes is None or bool((sizes == sizes[:1]).all()):
        return torch.ones(num_images, dtype=torch.long)
    if "pixel_values" in pictures and pictures["pixel_values"].ndim == 5:
        raise ValueError(_unknown(num_images, num_rows))
    return sizes.long().prod(-1).cpu()


def _owners_by_area(areas: Tensor, placeholders: Tensor) -> Tensor:
    """Return the row of each image, [images].

    The number of placeholders of an image is proportional to its area, such as its number of patches.
    """
    total, held = int(areas.sum()), int(placeholders.sum())
    tokens = areas * held
    if total == 0 or bool((tokens % total).any()):
        raise ValueError(_unknown(len(areas), len(placeholders)))
    tokens = tokens // total
    owners = torch.searchsorted(placeholders.cumsum(0), tokens.cumsum(0)).clamp_max(len(placeholders) - 1)
    if not torch.equal(torch.zeros_like(placeholders).index_add_(0, owners, tokens), placeholders):
        raise ValueError(_unknown(len(areas), len(placeholders)))
    return owners


def _unknown(num_images: int, num_rows: int) -> str:
    return (
        f"a batch of {num_rows} rows has {num_images} images, and its placeholder tokens do not show which belong to "
        "which row: give each row one image, read one row at a time (batch_size=1), or give the number of images "
        f"of each row as {COUNTS}"
    )
