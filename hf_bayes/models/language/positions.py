"""The positions of the tokens of padded rows."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def numbered(inputs: dict[str, Any], core: nn.Module, first: int) -> dict[str, Any]:
    """Return ``inputs`` with positions that count from each row's first token, as the model counts a row alone.

    Inputs with positions of their own, without padding on the left, or of a model that takes no positions are returned
    as they are.

    Args:
        inputs: the inputs of a forward pass without a cache.
        core: the transformers model.
        first: the position of the first token of a row alone.
    """
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or inputs.get("position_ids") is not None:
        return inputs
    is_padded_before = bool((mask[:, :-1] < mask[:, 1:]).any())
    if not is_padded_before or "position_ids" not in inspect.signature(core.forward).parameters:
        return inputs
    return {**inputs, "position_ids": (mask.long().cumsum(1) - 1).clamp_min(0) + first}
