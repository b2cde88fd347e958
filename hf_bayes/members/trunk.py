"""The trunk: the layers before the first random one run once for all members.

The model is called with M * B folded rows, so everything that it derives from them (masks, positions) has M * B rows.
Hooks cut the inputs of the trunk's blocks to B rows, and repeat the hidden states to M * B rows at the first random
block. If no block is random, they repeat the output of the last block, because pooling by a mask reads both. A hook
that does not fire costs time and never correctness, because the rows that it would have cut are copies.

If members run in several passes over the same rows, only the first pass runs the trunk (``Trunk.run_once``). A
``TrunkMemory`` keeps the trunk's output for rows that occur again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import decoder_blocks, decoder_of, modules_of
from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.context import Context
from hf_bayes.members.inputs import num_rows_of, padding_mask
from hf_bayes.members.pictures import pictures_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ROWS_TIMES_HEADS = ("bloom", "mpt")
"""Model types whose blocks take biases [rows * heads, ...] or [heads, ...], which cannot be cut to B rows."""

_ROWS_NOT_FIRST = ("gemma3n", "gemma3n_text", "xlnet")
"""Model types whose blocks take states [T, rows, ...] or [4, rows, T, h]: the first dimension may be B or M * B."""

_FOLDED_BESIDE_BLOCKS = ("longformer", "pvt_v2", "xmod")
"""Model types that use something of M * B rows beside the blocks: a mask, the number of rows, or their languages."""

_BIAS_OF_FIRST_BLOCK = ("wavlm",)
"""Model types whose first block returns a bias [rows * heads, ...] for all blocks. They have a trunk of all or none."""

_MIN_REPADDED_ROWS = 32
"""The number of rows repeated with another padding, from which a warning is given."""


class Trunk:
    """Forward pre-hooks on the blocks of a model.

    Attributes:
        num_blocks: the number of blocks before the first random parameter; 0 if there is no trunk.
    """

    def __init__(self, model: nn.Module, random_modules: Collection[nn.Module], context: Context) -> None:
        self.context = context
        self.handles: list[Any] = []
        self.memory: TrunkMemory | None = None
        self.blocks, self.num_blocks = _find_trunk(model, random_modules)
        self.has_dropout = _has_dropout(model)

    def install(self) -> None:
        """Register the hooks."""
        if self.num_blocks == 0:
            return
        hooks: list[tuple[nn.Module, Callable[..., Any]]] = [
            (block, self._cut) for block in self.blocks[: self.num_blocks]
        ]
        hooks += [(block, self._fan_out) for block in self.blocks[self.num_blocks : self.num_blocks + 1]]
        self.handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block, hook in hooks]
        if self.num_blocks == len(self.blocks):
            self.handles.append(self.blocks[-1].register_forward_hook(self._fan_out_last))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @contextmanager
    def run_once(self, inputs: dict[str, Any] | None = None) -> Iterator[None]:
        """Run the trunk only in the first of several passes over the same rows, until the end of the block.

        If the model calls a block of the trunk again after the trunk's last block (ALBERT has one block for all
        layers), every pass runs the trunk, because one stored output would stand for several.

        Args:
            inputs: the inputs of these passes. The trunk's memory, if there is one, may hold the output of their rows.
        """
        blocks = list(self.blocks[: self.num_blocks])
        if not blocks:
            yield
            return
        memory = self.memory if inputs is not None else None
        keys = [] if memory is None else row_keys(inputs or {})
        known = None if memory is None else memory.find(keys)
        stored: list[Any] = [] if known is None else [known]
        stored_in, repeats = -1, False
        before = [vars(block).get("forward") for block in blocks]

        def stand_in(block: nn.Module) -> Callable[..., Any]:
            own = block.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal stored_in, repeats
                if stored and stored_in == self.context.num_forwards:
                    repeats = True
                    stored.clear()
                if stored:
                    return stored[0]
                output = own(*args, **kwargs)
                if block is blocks[-1] and not repeats:
                    stored.append(_detached(output))
                    stored_in = self.context.num_forwards
                return output

            return forward

        for block in blocks:
            block.forward = stand_in(block)
        try:
            yield
        finally:
            for block, forward in zip(blocks, before, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward
        if memory is not None and known is None and stored:
            memory.keep(keys, stored[0])

    def _cut(self, block: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Cut [M * B, ...] to [B, ...] in all inputs of a block, unless a random module has run before."""
        context = self.context
        if not context.trunk or context.fanned_out:
            return None
        folded_rows, cuts = context.num_members * context.num_rows, context.cuts

        def cut(value: Any) -> Any:
            known = cuts.get(id(value))  # masks and positions are the same objects for every block
            if known is not None:
                return known[1]
            if isinstance(value, tuple):
                shorter: Any = tuple(cut(item) for item in value)
            elif type(value) is dict:  # DeepSeek-V4 has a table of position embeddings for each kind of attention
                shorter = {key: cut(item) for key, item in value.items()}
            elif not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != folded_rows:
                return value
            else:
                # a float matrix is a table and stays whole: DeBERTa's has 512 rows, as a folded batch may have
                shorter = value if value.ndim == 2 and value.is_floating_point() else value[: context.num_rows]
            cuts[id(value)] = value, shorter  # keep a reference to the value, so that its id is not used again
            return shorter

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}

    def _fan_out(self, block: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Repeat the hidden states M times; after the trunk they are the only tensor with B rows."""
        context = self.context
        if not context.trunk:
            return None
        context.fanned_out = True
        hidden = self._repeated(block, args[0] if args else kwargs["hidden_states"])
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _fan_out_last(self, block: nn.Module, args: Args, output: Any) -> Any:
        """Repeat the hidden states that the last block returns, alone or first in a tuple.

        The members' rows are still equal, so a block that is called again (ALBERT) is cut again.
        """
        if not self.context.trunk or self.context.fanned_out:
            return None
        if isinstance(output, tuple):
            return (self._repeated(block, output[0]), *output[1:])
        return self._repeated(block, output)

    def _repeated(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return hidden states [B, ...] as [M * B, ...]; others are returned unchanged."""
        context = self.context
        if hidden.shape[0] != context.num_rows:
            return hidden
        # dropout before the first stacked module would make the copies differ
        context.mark_fanned_out(copies=not (block.training and self.has_dropout))
        return context.repeat(hidden.detach())  # no random parameter before it, so no gradient is needed


class TrunkMemory:
    """A cache of the trunk's output, row by row. A frozen trunk without dropout has the same output for the same row.

    Args:
        max_bytes: the capacity. When the cache is full, new rows are computed each time.
    """

    def __init__(self, max_bytes: float) -> None:
        self.left = max_bytes
        self.rows: dict[RowKey, Tensor] = {}
        self._in_tuple = False
        self._unpadded: set[bytes] = set()
        self._num_found = self._num_repadded = 0

    def find(self, keys: list[RowKey]) -> Any:
        """Return the trunk's output for these rows; None unless all are stored. Warn once if padding is the reason."""
        unknown = [key for key in keys if key not in self.rows]
        if not keys or unknown:
            self._count_repadded(unknown)
            return None
        self._num_found += len(keys)
        hidden = torch.stack([self.rows[key] for key in keys])
        return (hidden,) if self._in_tuple else hidden

    def keep(self, keys: list[RowKey], output: Any) -> None:
        """Store a trunk's output, if it consists of hidden states only."""
        self._in_tuple = isinstance(output, tuple)
        hidden, *others = output if self._in_tuple else (output,)
        if any(other is not None for other in others) or len(hidden) != len(keys):
            return
        for key, row in zip(keys, hidden, strict=True):
            if key not in self.rows and row.nbytes <= self.left:
                self.left -= row.nbytes
                self.rows[key] = row.clone()
                if key.unpadded is not None:
                    self._unpadded.add(key.unpadded)

    def _count_repadded(self, unknown: list[RowKey]) -> None:
        before = self._num_repadded
        self._num_repadded += sum(key.unpadded in self._unpadded for key in unknown)
        if self._num_found < self._num_repadded and before < _MIN_REPADDED_ROWS <= self._num_repadded:
            warnings.warn(
                f"trunk_memory_gib is of little use to this run: {self._num_repadded} rows of the training data came "
                f"again padded to another length, {self._num_found} to the same length, and the output of the trunk "
                "depends on the padding. Pad all rows to one length (padding='max_length' where they are tokenized or "
                "collated), or leave trunk_memory_gib out"
            )


class RowKey(NamedTuple):
    """The digests of a row of a batch.

    Attributes:
        row: digest of all inputs of the model except labels.
        unpadded: digest of the same inputs without padding; None if there is no attention mask [B, T].
    """

    row: bytes
    unpadded: bytes | None


def row_keys(inputs: dict[str, Any]) -> list[RowKey]:
    """Return the keys of the rows of a batch; none if it has images beside text, which belong to no single row."""
    if "input_ids" in inputs and pictures_of(inputs):
        return []
    count = num_rows_of(inputs)
    tensors = [
        value.detach().cpu().contiguous()
        for name, value in sorted(tensors_in(inputs).items())
        if value.shape[:1] == (count,) and name != "labels"
    ]
    mask = padding_mask(inputs)
    if mask is None:
        return [RowKey(_digest(t[row] for t in tensors), None) for row in range(count)]
    read = mask.bool().cpu()
    padded = [tensor.shape[:2] == mask.shape for tensor in tensors]
    return [
        RowKey(
            _digest(t[row] for t in tensors),
            _digest(t[row][read[row]] if cut else t[row] for t, cut in zip(tensors, padded, strict=True)),
        )
        for row in range(count)
    ]


def _digest(tensors: Iterable[Tensor]) -> bytes:
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def _detached(output: Any) -> Any:
    match output:
        case tuple():
            return tuple(_detached(item) for item in output)
        case Tensor():
            return output.detach()
    return output


def _find_trunk(model: nn.Module, random_modules: Collection[nn.Module]) -> tuple[list[nn.Module], int]:
    """Return the blocks in order, and the number of blocks before the first random module."""
    found = decoder_blocks(model)
    config = getattr(model, "config", None)
    if found is None or getattr(config, "alibi", False):
        return [], 0
    kind = getattr(config, "model_type", None)
    if kind in (*_ROWS_TIMES_HEADS, *_ROWS_NOT_FIRST, *_FOLDED_BESIDE_BLOCKS):
        return [], 0
    if kind == "deberta-v2" and getattr(config, "conv_kernel_size", 0):  # it adds a convolution of M * B embeddings
        return [], 0
    if has_axes(config) or getattr(config, "use_weighted_layer_sum", False):  # a sum over the outputs of all layers
        return [], 0
    list_name, blocks = found
    random_ids = {id(module) for module in random_modules}
    decoder = decoder_of(model)
    if decoder is not None:  # the part that reads images runs before the blocks, regardless of the registration order
        backbone: Any = model.base_model
        before = {id(module) for module in backbone.modules()} - {id(module) for module in decoder.modules()}
        if random_ids & before:
            return [], 0
    order = [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in random_ids]
    all_names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    list_position = all_names.index(list_name)
    for name in order:  # registration order is execution order: embeddings, blocks, final norm, head
        if name.startswith(list_name + "."):
            before_it = int(name[len(list_name) + 1 :].split(".")[0])
            return list(blocks), 0 if kind in _BIAS_OF_FIRST_BLOCK else before_it
        if all_names.index(name) < list_position:
            return list(blocks), 0
    return list(blocks), len(blocks)


def has_axes(config: Any) -> bool:
    """Check whether positions are given on several axes [axes, rows, T], as Qwen2-VL's are."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return any("mrope_section" in str(getattr(text, name, None)) for name in ("rope_parameters", "rope_scaling"))


def _drops(fields: dict[Any, Any]) -> bool:
    """Check whether a configuration, or one of its parts, sets dropout, masks on audio features or noise of a router.

    All of these make equal rows differ in training.
    """
    masks = ("mask_time_prob", "mask_feature_prob") if fields.get("apply_spec_augment") else ()
    for field in fields.items():
        match field:
            case _, dict(part) if _drops(part):
                return True
            case str(name), float(value) if value > 0:
                drops = "drop" in name and not name.startswith(("summary", "classifier"))
                if drops or name in masks or "jitter_noise" in name:
                    return True
    return False


def _has_dropout(model: nn.Module) -> bool:
    """Check for dropout, by a module or by a function (attention_dropout of Llama): equal rows differ in training."""
    config = getattr(model, "config", None)
    functional = config is not None and _drops(config.to_dict())
    return functional or any(module.p > 0 for module in modules_of(model, nn.Dropout).values())
