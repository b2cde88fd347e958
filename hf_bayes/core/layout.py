"""The random parameters of a model, and their places in one flat row of theta.

A layout is a list of named tensors. theta [M, d] holds them side by side in that order. Tied weights are one entry.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind")
"""A class of modules, or a class of peft from which modules also inherit."""

_CHOICES = '"trainable", "last_layer", "last_block", "all" or a regular expression over parameter names'


@dataclass(frozen=True)
class Layout:
    """The correspondence between named tensors and the columns of theta.

    Attributes:
        names: parameter names of the model; for tied parameters, the first name.
        shapes: their shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by name."""
        return dict(zip(self.names, self.shapes, strict=True))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def dim(self) -> int:
        """d, the length of a row of theta."""
        return sum(self.sizes)

    def name_at(self, column: int) -> str:
        """Return the name of the tensor that holds a column of theta, 0 <= column < d."""
        assert 0 <= column < self.dim
        return self.names[bisect_right([*accumulate(self.sizes)], column)]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return {name: [*lead, *shape]} as one tensor [*lead, d].

        Raises:
            ValueError: if a key is missing or unknown, or a shape differs.
        """
        missing, extra = sorted(set(self.names) - set(tensors)), sorted(set(tensors) - set(self.names))
        if missing or extra:
            raise ValueError(f"tensors do not match the subspace: missing {missing}, unknown {extra}")
        lead = tensors[self.names[0]].shape[: -len(self.shapes[0]) or None]
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != (*lead, *shape):
                raise ValueError(f"{name}: expected shape {[*lead, *shape]}, got {list(tensors[name].shape)}")
        return torch.cat([tensors[name].reshape(*lead, -1) for name in self.names], dim=-1)

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Return views {name: [*lead, *shape]} of theta [*lead, d].

        The views come from one split, so the backward pass is one concatenation.
        """
        if theta.shape[-1] != self.dim:
            raise ValueError(f"theta must have {self.dim} columns ({len(self.names)} tensors), got {theta.shape[-1]}")
        pieces = theta.split(self.sizes, -1)
        return {
            name: piece.unflatten(-1, shape) if shape else piece.squeeze(-1)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }


def select(model: nn.Module, subspace: str = "trainable") -> Layout:
    """Choose the random parameters of a model.

    "trainable" requires that something is frozen: the base of an adapter, or weights that the caller froze. A model as
    it was loaded has no frozen weights. To sample all of them, the caller must write "all".

    Args:
        model: any module. "last_layer" and "last_block" need a model whose head and blocks are known.
        subspace: "trainable" (all parameters that require a gradient; in a peft model the adapter and
            ``modules_to_save``), "last_layer" (the output head, tied weights included), "last_block" (the last block
            of the longest list of blocks of one class), "all" (every parameter that is used), or a regular expression
            that is searched in parameter names.
    Raises:
        ValueError: if ``subspace`` is none of these, if it selects nothing, if "trainable" would select all base
            weights, or if a selected tensor is quantised.
    """
    chosen = _chosen_names(model, subspace)
    names, shapes, seen = [], [], set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in chosen or id(parameter) in seen:
            continue
        if not is_dense(parameter):
            kind = parameter.dtype if type(parameter.data) is Tensor else type(parameter.data).__name__
            raise ValueError(
                f"{name} is quantised ({kind}) and cannot be random: put LoRA on it, or choose another subspace"
            )
        seen.add(id(parameter))
        names.append(name)
        shapes.append(tuple(parameter.shape))
    if not names:
        if subspace == "trainable" and hasattr(model, "get_base_model"):  # peft loads an adapter frozen
            raise ValueError(
                "subspace='trainable' selects 0 parameters to sample, because the adapter is frozen: load it with "
                "PeftModel.from_pretrained(base, adapter, is_trainable=True)"
            )
        raise ValueError(
            f"subspace={subspace!r} selects 0 parameters to sample. Unfreeze some, add a peft adapter, or choose "
            f"{_CHOICES}"
        )
    return Layout(tuple(names), tuple(shapes))


def initial(model: nn.Module, layout: Layout) -> Tensor:
    """Return the model's own values [d], the starting point of chains, in float32 (float64 for a float64 model)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dtype = torch.float64 if parameters[layout.names[0]].dtype == torch.float64 else torch.float32
    return layout.flatten({name: parameters[name].detach().to(dtype) for name in layout.names})


def is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter stores its numbers directly: not quantised, packed or sharded over devices.

    A quantised tensor of torchao is a subclass that reports the dtype before quantisation. bitsandbytes may pack four
    bits into bfloat16.
    """
    direct = type(parameter.data) is Tensor and not hasattr(parameter, "quant_state")
    return direct and parameter.is_floating_point() and parameter.element_size() > 1


def decoder_of(model: nn.Module) -> nn.Module | None:
    """Return the text decoder of a multimodal model; None if the model has no other part."""
    core: Any = model
    if hasattr(core, "get_base_model"):
        core = core.get_base_model()
    config: Any = getattr(core, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config(decoder=True) is config:
        return None
    decoder = core.get_decoder() if hasattr(core, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not core else None


def modules_of(model: nn.Module, kind: type[Kind]) -> dict[str, Kind]:
    """Return the modules of a class by their paths; a module in several places has its first path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the longest ModuleList of blocks of one class, with its name; None if there is no such list.

    Lists inside a block (its experts, for example) do not count, and neither do parallel lists of equal length, which
    hold the parts of blocks (the attentions and feed-forward layers of XLM). In a multimodal model only the text
    decoder counts.
    """
    decoder = decoder_of(model)
    inside = None if decoder is None else {id(module) for module in decoder.modules()}
    lists = [
        (name, module)
        for name, module in modules_of(model, nn.ModuleList).items()
        if (inside is None or id(module) in inside)
        and len({type(block) for block in module}) == 1
        and not any(part.isdigit() for part in name.split("."))
    ]
    found = max(lists, key=lambda item: len(item[1]), default=None)
    return None if found is None or _is_parallel(found, lists) else found


def _is_parallel(found: tuple[str, nn.ModuleList], lists: list[tuple[str, nn.ModuleList]]) -> bool:
    """Check for another list with parameters in the same module, of the same length > 1."""
    parent, size = found[0].rpartition(".")[0], len(found[1])
    return size > 1 and any(
        other is not found[1]
        and len(other) == size
        and name.rpartition(".")[0] == parent
        and any(True for _ in other.parameters())
        for name, other in lists
    )


def grouped(names: Iterable[str], *, shown: int = 3) -> str:
    """Return a one-line list of parameter names: layer numbers become ``*``, and only the first few names are shown."""
    counts = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("base_model.model.")) for name in names)
    first = [f"{count} x {name}" if count > 1 else name for name, count in list(counts.items())[:shown]]
    rest = sum(list(counts.values())[shown:])
    return ", ".join([*first, *([f"and {rest} more"] if rest else [])])


def _chosen_names(model: nn.Module, subspace: str) -> set[str]:
    if not isinstance(subspace, str):
        raise ValueError(
            f"subspace must be a text, got {subspace!r:.100} ({type(subspace).__name__}): give {_CHOICES}; several "
            "names are joined by |, as in 'q_proj|v_proj'"
        )
    if not subspace:
        raise ValueError(f"subspace must be {_CHOICES}; got {subspace!r}")
    parameters = list(model.named_parameters(remove_duplicate=False))
    if subspace == "trainable":
        _refuse_all_trainable(parameters)
        return {name for name, parameter in parameters if parameter.requires_grad}
    if subspace == "all":  # peft keeps the original of a module in modules_to_save, and no forward pass reads it
        return {name for name, _ in parameters if ".original_module." not in name}
    if subspace == "last_layer":
        head = _output_head(model)
        ids = {id(parameter) for parameter in head.parameters()}
        return {name for name, parameter in parameters if id(parameter) in ids}
    if subspace == "last_block":
        found = decoder_blocks(model)
        if found is None:
            raise ValueError(f"{type(model).__name__} has no list of blocks: name parameters by a regular expression")
        ids = {id(parameter) for parameter in found[1][-1].parameters()}
        return {name for name, parameter in parameters if id(parameter) in ids}
    try:
        pattern = re.compile(subspace)
    except re.error as error:
        raise ValueError(
            f"subspace={subspace!r} is neither a known word nor a regular expression ({error}): correct "
            "it, or choose one of 'trainable', 'last_layer', 'last_block'"
        ) from error
    return {name for name, parameter in parameters if pattern.search(name)}


def _refuse_all_trainable(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Raise a ValueError if the caller froze no weight. Quantised weights and position tables do not count."""
    fixed = [n for n, p in parameters if not p.requires_grad and is_dense(p) and "position" not in n]
    trainable = {id(p): p.numel() for _, p in parameters if p.requires_grad}
    if fixed or not trainable:
        return
    raise ValueError(
        f"subspace='trainable' would sample all {sum(trainable.values()):,} weights of the base model: none of them is "
        "frozen. Add LoRA (peft.get_peft_model, or peft_config= of a trainer), set subspace='last_layer' for the "
        "output head alone, freeze the weights that stay as they are, or set subspace='all' to sample every weight"
    )


def _output_head(model: nn.Module) -> nn.Module:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    for name in ("score", "classifier"):
        head = head if head is not None else _find(model, name)
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head that is known: name it by a regular expression")
    copies = getattr(head, "modules_to_save", None)  # peft keeps the original beside the trained copy
    copy: nn.Module = head if copies is None else copies[head.active_adapters[0]]
    return copy


def _find(model: nn.Module, name: str) -> nn.Module | None:
    return next((module for path, module in model.named_modules() if path.split(".")[-1] == name), None)


def per_tensor_mean(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return [M, S], the mean of ``values`` [M, d] over each of S random tensors with ``sizes`` elements."""
    return torch.stack([part.mean(1) for part in values.split(sizes, dim=1)], dim=1)


def per_element(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return [M, d] from ``values`` [M, S]: every element gets the number of its tensor."""
    parts = [value.expand(-1, size) for value, size in zip(values.split(1, dim=1), sizes, strict=True)]
    return torch.cat(parts, dim=1)
