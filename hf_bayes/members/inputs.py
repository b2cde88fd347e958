"""The inputs of a model: a batch without its labels, numbers of rows and positions, and rows repeated for members."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.pictures import PICTURES

LABELS = frozenset({"labels", "label", "label_ids"})
"""The names under which the collators of transformers read and write labels."""


def without_labels(batch: Mapping[str, Any], columns: Collection[str] = ()) -> dict[str, Any]:
    """Return the inputs of a batch: everything but its labels, whatever their name.

    Args:
        batch: a batch with or without labels.
        columns: the names of the columns that belong to the labels, such as the weights of rows.
    """
    return {name: value for name, value in batch.items() if name not in LABELS and name not in columns}


def repeat_rows(inputs: dict[str, Any], num_rows: int, num_members: int) -> dict[str, Any]:
    """Fold a batch: every tensor (also in dicts) with ``num_rows`` rows is repeated for each member, member-major.

    All images are repeated together, whatever the number per row, because they are in the order of the rows.
    """

    def fold(value: Tensor, axis: int) -> Tensor:
        return value if value.ndim < 2 else value.repeat(*[1] * axis, num_members, *[1] * (value.ndim - axis - 1))

    return inputs if num_members == 1 else _each_with_rows(inputs, num_rows, fold, PICTURES)


def take_rows(inputs: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """Return the rows ``index`` [k] of a batch, in this order; a row may come several times."""
    return _each_with_rows(
        inputs, num_rows_of(inputs), lambda value, axis: value.index_select(axis, index.to(value.device))
    )


def _each_with_rows(
    inputs: Mapping[str, Any], num_rows: int, change: Callable[[Tensor, int], Tensor], others: Collection[str] = ()
) -> dict[str, Any]:
    """Return a copy of a batch with ``change(tensor, axis of its rows)`` in place of each tensor that has its rows.

    Positions on several axes, [axes, rows, T], have their rows in the second dimension, unless rows are of several
    texts, whose positions are [rows, texts, T].

    Args:
        others: names of tensors to change, too, along their first dimension.
    """
    ids = inputs.get("input_ids")
    texts = isinstance(ids, Tensor) and ids.ndim == 3

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(key, item) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        axis = int(name == "position_ids" and value.ndim == 3 and not texts)
        return change(value, axis) if value.shape[axis : axis + 1] == (num_rows,) or name in others else value

    return {name: changed(name, value) for name, value in inputs.items()}


def padding_mask(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the attention mask [B, T]; None without one. Masks of other shapes do not show padding."""
    mask = tensors_in(inputs).get("attention_mask")
    return mask if mask is not None and mask.ndim == 2 else None


def num_rows_of(inputs: Mapping[str, Any]) -> int:
    """Return B, the first dimension of the model's main input."""
    return shape_of(inputs)[0]


def num_positions_of(inputs: dict[str, Any]) -> int:
    """Return T, the second dimension of the model's main input; 1 if it has none."""
    return shape_of(inputs)[1]


def shape_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return (B, T), see ``num_rows_of`` and ``num_positions_of``."""
    shape = _main_input(inputs).shape
    return shape[0], shape[1] if len(shape) > 1 else 1


def shape_of_texts(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (B, K, T) for B rows of K texts with T positions each; K is 1 unless ``input_ids`` are [B, K, T]."""
    ids = inputs.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 3:
        return ids.shape[0], ids.shape[1], ids.shape[2]
    rows, positions = shape_of(inputs)
    return rows, 1, positions


def _main_input(inputs: Mapping[str, Any]) -> Tensor:
    for key in ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features"):
        if isinstance(value := inputs.get(key), Tensor):
            return value
    found = [tensor for tensor in tensors_in(inputs).values() if tensor.ndim >= 1]
    if not found:
        raise ValueError(f"no tensor among the model's inputs {sorted(inputs)}: the number of rows is unknown")
    return found[0]
