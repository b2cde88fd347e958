"""Rows of several texts each, such as pairs of answers: ``input_ids`` [B, 2, T] go through the model as [2 B, T]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_bayes.core.tensors import with_tensors
from hf_bayes.models.input_check import BATCH, CUT, InputCheck


def holds_groups(inputs: Mapping[str, Any]) -> bool:
    """Return whether each row of a batch has several texts."""
    ids = inputs.get("input_ids")
    return isinstance(ids, Tensor) and ids.ndim == 3


def flattened(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of texts: tensors [B, 2, T] become [2 B, T], with the texts of a row side by side."""
    return with_tensors(inputs, lambda tensor: tensor.flatten(0, 1) if tensor.ndim == 3 else tensor)


def grouped(rewards: Tensor, texts_per_row: int) -> Tensor:
    """Return [M, B, 2], the outputs of the texts of each row, given [M, 2 B, 1]."""
    return rewards[..., 0].unflatten(1, (-1, texts_per_row))  # type: ignore[no-any-return]


class GroupCheck(InputCheck):
    """The check of a model's inputs for rows of several texts, or of one.

    Args:
        core: the transformers model.
        texts_per_row: the number of texts in a row of several.
    """

    def __init__(self, core: nn.Module, texts_per_row: int) -> None:
        super().__init__(core)
        self._texts_per_row = texts_per_row

    def __call__(self, inputs: Mapping[str, Any], *, where: str = BATCH, first: int = 0, advice: str = CUT) -> None:
        """Raise a ValueError as ``InputCheck``. Texts of pairs are counted one by one."""
        if not holds_groups(inputs):
            super().__call__(inputs, where=where, first=first, advice=advice)
            return
        size = inputs["input_ids"].shape[1]
        if size != self._texts_per_row:
            raise ValueError(
                f"a row of {where} has {size} texts, expected {self._texts_per_row}: input_ids [rows, "
                f"{self._texts_per_row}, tokens], one after the other in the order of their labels"
            )
        super().__call__(flattened(inputs), where=f"the texts of {where}", first=first * size, advice=advice)
