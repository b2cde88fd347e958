"""Rows of tokens that are padded on the left, moved so that a model with a head reads them as it reads a row alone.

transformers counts the padding on the left as positions, and encoders pool the first position, which is then padding.
With the padding on the right both are as in a row alone. So rows are moved before a pass, and outputs of single tokens
are moved back after it. Language models that write text are not concerned: their padding belongs on the left. Nor are
classes that are not of transformers: their heads may read any position.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.tensors import with_tensors
from hf_bayes.members.inputs import padding_mask
from hf_bayes.members.pictures import PICTURES


class Moved(NamedTuple):
    """The inputs of a pass.

    Attributes:
        inputs: the inputs, with the padding of each row on the right.
        places: [copies * B, T], the places in ``inputs`` of the tokens of the given rows; None if nothing was moved.
    """

    inputs: dict[str, Any]
    places: Tensor | None

    def back(self, values: Tensor, num_behind: int = 1) -> Tensor:
        """Return values [copies * B, T, ...] in the order of the given tokens; values of whole rows stay as they are.

        Args:
            num_behind: the number of dimensions behind T, by which values of tokens are known.
        """
        if self.places is None or values.ndim != 2 + num_behind or values.shape[:2] != self.places.shape:
            return values
        return _taken(values, self.places)


class PaddedRows:
    """The way in which a model with a head reads padded rows.

    Args:
        core: the transformers model.

    Attributes:
        moves: whether padding on the left is moved to the right. False for models that write text, for models whose
            head reads the last position (XLNet), and for classes that are not of transformers.
        reads_pad_token: whether the head finds the last token of a text by ``config.pad_token_id``.
    """

    def __init__(self, core: Any) -> None:
        core = core.get_base_model() if hasattr(core, "get_base_model") else core  # without peft's wrapper
        self.config: Any = getattr(core, "config", None)
        self._name, writes = type(core).__name__, getattr(core, "can_generate", None)
        is_known = type(core).__module__.startswith("transformers.")
        reads_last = getattr(self.config, "summary_type", None) == "last"
        self.moves = is_known and not reads_last and not (writes is not None and writes())
        names = _names_read(type(core)) if is_known else frozenset()
        self.reads_pad_token, self._asks_text_part = "pad_token_id" in names, "get_text_config" in names

    def moved(self, inputs: dict[str, Any], num_copies: int = 1) -> Moved:
        """Return the inputs of a pass, with padding on the right.

        Args:
            num_copies: how often the pass reads each row, once for each member.
        Raises:
            ValueError: for several rows, or padding, if the head needs a padding token and the model has none.
        """
        pad_token = self._pad_token() if self.reads_pad_token else None
        if self.reads_pad_token and pad_token is None:
            self._require_one_row(inputs, num_copies)
            return Moved(inputs, None)
        mask, offsets, ids = padding_mask(inputs), self._offsets(inputs), inputs.get("input_ids")
        if pad_token is not None and mask is not None and isinstance(ids, Tensor) and ids.shape == mask.shape:
            inputs = {**inputs, "input_ids": ids.masked_fill(mask == 0, pad_token)}  # tokenizers may pad with others
        if offsets is None or mask is None:
            return Moved(inputs, None)
        steps, length = torch.arange(mask.shape[1], device=mask.device), mask.shape[1]
        rows = {name: _row_moved(name, value, (steps + offsets) % length) for name, value in inputs.items()}
        return Moved(rows, ((steps - offsets) % length).repeat(num_copies, 1))

    def tokens_moved(self, inputs: Mapping[str, Any], values: Tensor | None) -> Tensor | None:
        """Return values [B, T] (or [B, K, T]) of the tokens of a batch, in the order in which the model reads them."""
        mask = inputs.get("attention_mask")
        if values is None or not isinstance(mask, Tensor) or mask.shape != values.shape or mask.ndim not in (2, 3):
            return values
        is_group = mask.ndim == 3  # several texts in a row
        offsets = self._offsets(with_tensors(inputs, lambda x: x.flatten(0, 1) if is_group and x.ndim == 3 else x))
        if offsets is None:
            return values
        places = (torch.arange(mask.shape[-1], device=mask.device) + offsets) % mask.shape[-1]
        return values.reshape(places.shape).gather(1, places).view_as(values)

    def _offsets(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return [B, 1], the place of the first token of each row; None if no row is moved."""
        mask, read = padding_mask(inputs), _read(inputs)
        if not self.moves or mask is None or read is None or read.shape[:2] != mask.shape:
            return None
        if self.reads_pad_token and inputs.get("input_ids") is None:  # transformers then reads the last position
            return None
        first = mask.ne(0).int().argmax(1, keepdim=True)
        return first if bool(first.any()) else None

    def _pad_token(self) -> int | None:
        """Return the padding token by which the head finds the end of a text, as it is now: a user may set it."""
        own = self.config.get_text_config() if self._asks_text_part else self.config
        return getattr(own, "pad_token_id", None)

    def _require_one_row(self, inputs: Mapping[str, Any], num_copies: int) -> None:
        mask, read = padding_mask(inputs), _read(inputs)
        num_rows, ends_padded = 0 if read is None else len(read), mask is not None and not bool(mask[:, -1].all())
        if num_copies * num_rows > 1 or ends_padded:
            given = "a text that ends in padding"
            if num_copies * num_rows > 1:
                given = f"{num_copies} x {num_rows} rows (members x texts) in one pass"
            part = ".get_text_config()" if self._asks_text_part and self.config.get_text_config() != self.config else ""
            raise ValueError(
                f"{self._name} finds the last token of each text by its config's pad_token_id, which is None, got "
                f"{given}: set model.config{part}.pad_token_id = tokenizer.pad_token_id"
            )


def _read(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens or the embeddings that a model reads; None for pictures and sounds."""
    given = (inputs.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((value for value in given if isinstance(value, Tensor)), None)


def _row_moved(name: str, value: Any, places: Tensor) -> Any:
    if not isinstance(value, Tensor) or name in PICTURES:
        return value
    if name == "position_ids" and value.shape[-1:] == places.shape[1:]:  # [T], [1, T], [B, T] or [axes, B, T]
        leading = value.shape[:-2] if value.ndim > 2 else ()
        value = value.expand(*leading, *places.shape)
        return value.gather(-1, places.expand_as(value))
    return _taken(value, places) if value.shape[:2] == places.shape else value


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """Return values [B, T, ...] with the tokens of each row in the order of ``places`` [B, T]."""
    return values.gather(1, places.view(*places.shape, *[1] * (values.ndim - 2)).expand_as(values))


def _names_read(kind: type) -> frozenset[str]:
    """Return the names of attributes that the forward of a class reads, and those of the forwards that it calls."""
    names: frozenset[str] = frozenset()
    for each in kind.__mro__:
        if "forward" in vars(each):
            code = getattr(inspect.unwrap(vars(each)["forward"]), "__code__", None)
            names |= frozenset(() if code is None else code.co_names)
            if "super" not in names:
                break
    return names
