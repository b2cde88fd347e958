"""Check token ids before the model reads them: their dtype, their range, their mask and their number."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_bayes.core.layout import modules_of
from hf_bayes.core.number_checks import is_integer
from hf_bayes.members.inputs import padding_mask
from hf_bayes.members.padded_rows import PaddedRows

_DTYPES = (torch.int64, torch.int32)
_WANTED = "expected a tensor of integers [rows, tokens]"
BATCH = "the batch"
CUT = "cut the text, in Python with truncation=True, max_length={longest}, in a command with --max_length {longest}"

SHORTEN = "shorten the prompt to leave room for new tokens"


class InputCheck:
    """Refuse inputs that would fail deep inside a model, or for which its outputs would mean nothing.

    Rows longer than the context are refused if a table holds the positions (GPT-2, BERT). If positions are computed
    (rotary), there is one warning: the model was not trained on such positions.

    Args:
        core: the transformers model.

    Attributes:
        num_tokens: rows of the input embedding; None for a model that reads no tokens.
        longest: tokens of the model's context; None if it has no limit.
        has_table: whether positions come from a table of that length.
        first_position: the position of a row's first token: not 0 in the RoBERTa family.
    """

    def __init__(self, core: nn.Module) -> None:
        self.num_tokens = _num_tokens(core)
        self.longest, self.has_table = context_of(core)
        self.first_position = first_position_of(core)
        self._warned, self._moves = False, PaddedRows(core).moves

    def __call__(self, inputs: Mapping[str, Any], *, where: str = BATCH, first: int = 0, advice: str = CUT) -> None:
        """Raise a ValueError for ``input_ids`` and ``attention_mask`` that the model cannot take.

        Inputs without ``input_ids`` (images, embeddings) are not checked. The process waits once for the device.

        Args:
            inputs: the inputs of a forward pass without a cache.
            where: the caller's name for the rows.
            first: number of the first row.
            advice: what to do about a row that is too long; ``{longest}`` stands for the tokens of the context.
        """
        ids, mask = inputs.get("input_ids"), padding_mask(inputs)
        if ids is None or self.num_tokens is None:
            return
        require_ids(ids)
        if mask is None:
            mask = torch.ones_like(ids)
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(ids.shape)}, got {list(mask.shape)}: take "
                "both from one call of the tokenizer"
            )
        kept = mask.bool()
        low, high = ids.aminmax()
        empty = ~kept.any(1)
        smallest, largest, num_empty = torch.stack([low, high, empty.sum()]).tolist()
        if smallest < 0 or largest >= self.num_tokens:
            row = int(((ids < 0) | (ids >= self.num_tokens)).any(1).nonzero()[0])
            raise ValueError(
                f"{_name(row, len(ids), where, first)} has the token id {smallest if smallest < 0 else largest}, "
                f"expected 0 to {self.num_tokens - 1}, the rows of the model's embedding: encode the text with the "
                "model's own tokenizer (-100 belongs to labels only)"
            )
        if num_empty:
            raise ValueError(
                f"{_name(int(empty.nonzero()[0]), len(ids), where, first)} is padding alone (its attention_mask is all "
                "0): there is no text to answer. Leave the row out"
            )
        if self.longest is not None and ids.shape[1] > self.longest:
            length, row = self._longest_row(kept, inputs.get("position_ids"))
            if length > self.longest:
                own = int(kept[row].sum())
                padding = f", {length - own} of them padding," if own < length == ids.shape[1] else ","
                what = f"{_name(row, len(ids), where, first)} has {length} tokens{padding}"
                self._too_long(what, advice.format(longest=self.longest))

    def check_pass(self, inputs: Mapping[str, Any], cache: Any) -> None:
        """Raise as ``__call__``; with a cache, a step of the caller's own decoding loop, without a wait for the device.

        Args:
            inputs: the inputs of a forward pass.
            cache: the cache that it reads; None without one.
        """
        if cache is None or inputs.get("input_ids") is None:
            self(inputs)
        else:
            require_ids(inputs["input_ids"])

    def check_generation(self, mask: Tensor, num_new: int) -> None:
        """Raise, or warn, if prompts and new tokens together are longer than the context.

        Args:
            mask: [rows, T] the attention mask of the prompts.
            num_new: the number of new tokens that each prompt may get.
        """
        if self.longest is None or mask.shape[-1] + num_new <= self.longest or mask.ndim != 2:
            return
        prompt = int(mask.bool().sum(1).max())
        room = self.longest - prompt
        if num_new > room:
            self._too_long(
                f"a prompt of {prompt} tokens and {num_new} new ones are",
                f"lower max_new_tokens to {room} or less, or shorten the prompt" if room > 0 else SHORTEN,
            )

    def _longest_row(self, kept: Tensor, positions: Any) -> tuple[int, int]:
        """Return the number of positions that the longest row needs, and which row it is."""
        packed = isinstance(positions, Tensor)  # packed rows begin anew
        lengths = positions.reshape(-1, positions.shape[-1]).amax(1) + 1 if packed else kept.sum(1)
        length, row = lengths.max(0)
        # padding on the right has positions, too, and so has padding that is moved there
        if not packed and self.has_table and (self._moves or bool(kept[:, 0].all())):
            return kept.shape[1], int(row)
        return int(length), int(row)

    def _too_long(self, what: str, advice: str) -> None:
        context = f"more than the model's context of {self.longest} tokens (max_position_embeddings)"
        if self.has_table:
            raise ValueError(f"{what} {context}, and its table of positions ends there: {advice}")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} {context}: it was not trained on such positions, and its uncertainty there may mean nothing. "
                f"To avoid this, {advice}"
            )


def _name(row: int, num_rows: int, where: str, first: int) -> str:
    """Return words for a row. The only text of a batch needs no number."""
    return "the text" if num_rows == 1 and where == BATCH else f"row {first + row} of {where}"


def require_ids(ids: Any) -> None:
    """Raise a ValueError for token ids that are not integers [rows, tokens]."""
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"input_ids: {_WANTED}, got {type(ids).__name__}: give torch.tensor(ids), or what "
            "tokenizer(..., return_tensors='pt') returns"
        )
    if ids.dtype not in _DTYPES:
        raise ValueError(f"input_ids: {_WANTED}, got {ids.dtype}: token ids are indices; convert them with .long()")
    if ids.ndim != 2:
        advice = "add the dimension of rows: input_ids[None]" if ids.ndim == 1 else "give one row per text"
        raise ValueError(f"input_ids: {_WANTED}, got the shape {list(ids.shape)}: {advice}")
    if ids.numel() == 0:
        raise ValueError(
            f"input_ids: {_WANTED}, of each one or more, got the shape {list(ids.shape)}: leave empty batches and "
            "empty texts out"
        )


def check_vocabulary(tokenizer: Any, core: nn.Module) -> None:
    """Raise a ValueError for a tokenizer with ids that the model's embedding does not have.

    Args:
        tokenizer: an object that is not a tokenizer is not checked.
    """
    num_tokens = _num_tokens(core)
    if num_tokens is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    largest = max([tokenizer.vocab_size - 1, *tokenizer.added_tokens_decoder])
    if largest >= num_tokens:
        raise ValueError(
            f"the tokenizer has token ids up to {largest}, the model's embedding has rows 0 to {num_tokens - 1}: take "
            "the model's own tokenizer, or call resize_token_embeddings before training (docs/models.md)"
        )


def _num_tokens(core: Any) -> int | None:
    """Return the number of rows of the input embedding; None if it is not a table of tokens."""
    try:
        embedding = core.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    count = getattr(getattr(embedding, "base_layer", embedding), "num_embeddings", None)
    return count if is_integer(count) else None


def context_of(core: Any) -> tuple[int | None, bool]:
    """Return the tokens of a model's context (None: no limit), and whether a table of positions ends there.

    Args:
        core: the transformers model, without peft's wrapper.
    """
    longest = _configured_length(core)
    if longest is None:
        return None, False
    return longest - first_position_of(core), _table_of_positions(core) is not None


def first_position_of(core: Any) -> int:
    """Return the position of a row's first token: in the RoBERTa family it follows the padding token's row, else 0."""
    table = _table_of_positions(core)
    # OPT adds an offset of its own to positions that begin at 0
    return 0 if table is None or table.padding_idx is None or hasattr(table, "offset") else table.padding_idx + 1


def _table_of_positions(core: Any) -> nn.Embedding | None:
    """Return the embedding of positions that is as long as the context; None if positions are computed."""
    longest = _configured_length(core)
    if longest is None:
        return None
    for name, module in modules_of(core, nn.Embedding).items():
        # OPT's table has rows before the first position
        is_table = name.endswith("wpe") or "pos" in name.rpartition(".")[2]
        if is_table and module.num_embeddings == longest + getattr(module, "offset", 0):
            return module
    return None


def _configured_length(core: Any) -> int | None:
    longest = getattr(core.config.get_text_config(), "max_position_embeddings", None)
    return longest if is_integer(longest, 1) else None
