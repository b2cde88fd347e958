"""Hooks that record the input and the output gradient of the modules that own random parameters.

An identity behind each of these modules passes (input, output gradient) to a consumer in the backward pass. It stores
neither: the input is a saved tensor, which activation checkpointing recomputes. The gradient of a random parameter, for
each row, is computed from this pair. A backward pass that delivers the pairs is a vector-Jacobian product (VJP).

A row of the data may have several texts, such as a pair of answers. They go through the model one by one. The record of
such a row holds the positions of all its texts side by side, so that a sum over positions is a sum over texts, too.

curvlinops (matrix-free products, K-FAC on nn.Linear) is no replacement. It supports neither Conv1D, norms, embeddings
nor peft's factors, differentiates the loss of whole batches in its own loop, and keeps the logits of all positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.core import compat
from hf_bayes.core.tensors import with_tensors
from hf_bayes.members import batch_norm
from hf_bayes.members.convolution import CONVOLUTIONS
from hf_bayes.members.inputs import shape_of_texts
from hf_bayes.members.padded_rows import PaddedRows
from hf_bayes.methods.laplace.accumulators import UnsupportedModule


class HookedLayer:
    """A module that owns random parameters.

    Attributes:
        path: the module's name in the model.
        names: attribute of the module -> the parameter's name in the layout.
        weight: the name of its weight matrix, if the module is linear and no other module owns the matrix; else None.
        transposed: True if the weight matrix is [in, out] (Conv1D).
        tied: names of parameters that another module owns as well.
        has_channels: True if the module reads pictures or signals, [rows, channels, ...].
        is_head: True if the module computes the model's outputs.
        reader: the module whose input identifies the input of this one (see ``LayerHooks``).
    """

    def __init__(self, path: str, module: nn.Module, names: Mapping[str, str], tied: set[str]) -> None:
        self.path, self.module, self.names = path, module, dict(names)
        self.transposed = isinstance(module, Conv1D)
        self.linear = type(module) is nn.Linear or self.transposed
        first = getattr(module, "data_format", "") == "channels_first"
        self.has_channels = first or type(module) in (*CONVOLUTIONS, *batch_norm.KINDS)
        self.tied = tied & set(self.names.values())
        own = self.names.get("weight") if self.linear else None
        self.weight = None if own in self.tied else own
        self.is_head = False
        self.reader: nn.Module = module

    def row_gradients(
        self, x: Tensor, g: Tensor, dtype: torch.dtype, only: str | None = None, num_texts: int = 1
    ) -> dict[str, Tensor]:
        """Return the gradient of each row in the module's random parameters, {name: [R, *shape]}.

        Args:
            x: [R, P, in] the module's input (embeddings: ids [R, P]; with channels: [R, K, in, ...]).
            g: [R, P, out] the gradient of its output (with channels: [R, K, out, ...]).
            dtype: the dtype of the computation.
            only: the name of one parameter that is wanted; None means all.
            num_texts: K, the number of texts in a row. Each has P / K positions.
        """
        wanted = {attribute: name for attribute, name in self.names.items() if only in (None, name)}
        if not self.linear:
            if not self.has_channels:
                x, g = x.unflatten(1, (num_texts, -1)), g.unflatten(1, (num_texts, -1))
            return self._through_own_forward(wanted, x, g, dtype)
        x, g, found = x.to(dtype), g.to(dtype), {}
        if "weight" in wanted:
            left, right = (x, g) if self.transposed else (g, x)
            found[wanted["weight"]] = left.mT @ right
        if "bias" in wanted:
            found[wanted["bias"]] = g.sum(1)
        return found

    def _through_own_forward(
        self, wanted: Mapping[str, str], x: Tensor, g: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Differentiate the module's own forward for each row. This works for every norm and embedding.

        Args:
            x, g: [R, K, ...], the K texts of each row; the module takes them as a batch.
        """
        leaves = {attribute: getattr(self.module, attribute).detach() for attribute in wanted}

        def of_row(one: Tensor, gradient: Tensor) -> dict[str, Tensor]:
            y, vjp_of, *_ = torch.func.vjp(lambda values: compat.forward_with(self.module, values, one), leaves)
            found: dict[str, Tensor] = vjp_of(gradient.to(y.dtype))[0]
            return found

        rows = torch.func.vmap(of_row)(x.detach(), g.detach())
        return {name: rows[attribute].to(dtype) for attribute, name in wanted.items()}


class LayerRecord(NamedTuple):
    """The input and output gradient of one module in one backward pass.

    Attributes:
        layer: the module.
        source: a number of the input; layers with the same input tensor have the same number.
        x: [R, P, in] the input (embeddings: [R, P]; with channels: [R, K, in, ...]).
        g: [R, P, out] the output gradient (with channels: [R, K, out, ...]).
        rows: the rows of the batch that ``x`` and ``g`` belong to.
        valid: [R, P] bool, False at padding; None if every position counts.
        first: True in the first backward pass of a batch, when inputs are new.
        again: True if the pass has already delivered these rows of this module, because the model calls it repeatedly.
        num_texts: K, the number of texts in a row; its P positions are those of the texts side by side.
    """

    layer: HookedLayer
    source: int
    x: Tensor
    g: Tensor
    rows: slice
    valid: Tensor | None
    first: bool
    again: bool
    num_texts: int = 1


class LayerHooks:
    """The hooks on all layers of a model that own random parameters.

    Args:
        model: the model that the names refer to, without a member axis.
        names: the parameter names of the layout.
        of_images: those in the part that reads images, whose positions are no tokens.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], of_images: frozenset[str] = frozenset()) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        wanted = {id(parameters[name]): name for name in names}
        modules = dict(model.named_modules())  # a module in several places has its first path
        owned: dict[str, dict[str, str]] = {}
        for name, parameter in parameters.items():
            path, _, attribute = name.rpartition(".")
            if id(parameter) in wanted and path in modules:
                owned.setdefault(path, {})[attribute] = wanted[id(parameter)]
        uses = [name for own in owned.values() for name in own.values()]
        tied = {name for name in uses if uses.count(name) > 1}
        self.layers = [HookedLayer(path, modules[path], own, tied) for path, own in owned.items()]
        self._read_lora_inputs(modules.values())
        head = _head_of(modules)
        for layer in self.layers:
            layer.is_head = head is not None and layer.path.startswith(head)
        self.anchor = torch.zeros((), requires_grad=True)
        """A leaf on which every hooked output depends. A backward pass to it reaches all hooks, and nothing else."""
        self._consume: Callable[[LayerRecord], None] | None = None
        self._delivered: set[tuple[int, int]] = set()
        self._called: set[int] = set()
        self._of_images = {i for i, layer in enumerate(self.layers) if of_images & set(layer.names.values())}
        self._first, self._num_rows, self._num_texts, self._num_positions, self._rows = True, 1, 1, 1, slice(None)
        self._valid: Tensor | None = None
        self._terms: Tensor | None = None
        self._one_row, self._padded_rows = False, PaddedRows(model)
        self._seen: list[tuple[Any, int]] = []
        self._sources: dict[int, int] = {}

    def _read_lora_inputs(self, modules: Iterable[nn.Module]) -> None:
        """Identify the input of a LoRA factor A by the input of its layer, because peft casts it for each layer."""
        layers = [module for module in modules if isinstance(module, LoraLayer)]
        factors: dict[int, Any] = {id(factor): layer for layer in layers for factor in layer.lora_A.values()}
        for layer in self.layers:
            layer.reader = factors.get(id(layer.module), layer.module)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Register the hooks until the end of the block."""
        device = next(iter(self.layers)).module.parameters().__next__().device
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        handles = []
        for index, layer in enumerate(self.layers):
            handles.append(layer.reader.register_forward_pre_hook(self._input_hook(index), with_kwargs=True))
            handles.append(layer.module.register_forward_hook(self._output_hook(index), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._consume, self._seen, self._sources = None, [], {}

    def begin(self, inputs: Mapping[str, Any], terms: Tensor | None = None) -> None:
        """Start a batch.

        Args:
            inputs: B rows of K texts each; ``attention_mask`` is 0 at padding. If K > 1, the model will read B K texts,
                the texts of a row one after the other.
            terms: [B, T], True at likelihood terms.
        """
        self._num_rows, self._num_texts, positions = shape_of_texts(inputs)
        self._terms = self._padded_rows.tokens_moved(inputs, terms)
        self._rows, self._one_row, self._num_positions = slice(0, self._num_rows), False, self._num_texts * positions
        mask = self._padded_rows.tokens_moved(inputs, inputs.get("attention_mask"))
        mask = mask.flatten(1) if mask is not None and self._num_texts > 1 else mask
        self._valid = None if mask is None or mask.ndim != 2 else mask.bool()
        self._seen, self._sources = [], {}

    def on_backward(self, consume: Callable[[LayerRecord], None], *, first: bool) -> None:
        """Pass the inputs and output gradients of the next backward pass to ``consume``.

        Args:
            consume: called once per module and call of the module.
            first: True for the first backward pass of a batch.
        """
        self._consume, self._first, self._delivered = consume, first, set()

    @contextmanager
    def one_row(self, row: int, valid: Tensor | None = None, num_texts: int = 1) -> Iterator[None]:
        """Within the block, forward and backward passes are over this row only.

        Args:
            row: the number of the row in the batch.
            valid: [1, P], False at positions that do not count; None if all count.
            num_texts: K, the number of texts to which the P positions belong.
        """
        before = self._rows, self._one_row, self._valid, self._num_texts
        self._rows, self._one_row, self._valid, self._num_texts = slice(row, row + 1), True, valid, num_texts
        try:
            yield
        finally:
            self._rows, self._one_row, self._valid, self._num_texts = before

    def _input_hook(self, index: int) -> Callable[..., None]:
        def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = _input_of(args, kwargs)
            self._seen = [(ref, source) for ref, source in self._seen if ref() is not None]
            self._sources[index] = next((source for ref, source in self._seen if ref() is x), index)
            if self._sources[index] == index:
                self._seen.append((weakref.ref(x), index))

        return remember

    def _output_hook(self, index: int) -> Callable[..., Tensor]:
        apply: Callable[..., Tensor] = _Identity.apply

        def insert_identity(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            x, rows = _input_of(args, kwargs), 1 if self._one_row else self._num_rows * self._num_texts
            self._called.add(index)
            if isinstance(module, nn.Embedding) and output.shape[0] == 1 < rows:  # position ids [1, T] for all rows
                x, output = x.expand(rows, *x.shape[1:]), output.expand(rows, *output.shape[1:])
            if not self._one_row:
                self._require_rows_of_batch(index, output)
            found = apply(self, index, self._sources.get(index, index), x, output, self.anchor)
            # residual blocks of convolutions add in place, which a view from a function of our own does not allow
            return found.clone() if self.layers[index].has_channels else found

        return insert_identity

    def _require_rows_of_batch(self, index: int, output: Tensor) -> None:
        """Check that the output has the rows of the batch; otherwise gradients cannot be assigned to rows.

        Raises:
            UnsupportedModule: naming a parameter of the module.
        """
        layer, expected = self.layers[index], self._num_rows * self._num_texts
        tokens = output.ndim == 2 and output.shape[0] == self._num_rows * self._num_positions  # row after row
        one = expected == 1 and index in self._of_images and not layer.has_channels  # all images are of this row
        if output.shape[0] != expected and not tokens and not one:
            raise UnsupportedModule(
                f"{next(iter(layer.names.values()))}: its module was called with {output.shape[0]} rows, "
                f"expected {expected}: the model puts positions first, shuffles rows (experts, windows), or calls it "
                "on a table. Row gradients are not defined: leave it out of the subspace, or use estimator='hessian'"
            )

    def check_all_called(self) -> None:
        """Check, after a pass, that it called every hooked module. Without a call there is no curvature.

        Raises:
            UnsupportedModule: naming a parameter that was not read. The model uses it outside its module, or not at
                all.
        """
        unread = [name for i, layer in enumerate(self.layers) if i not in self._called for name in layer.names.values()]
        if unread:
            raise UnsupportedModule(
                f"{len(unread)} random parameters were not read in a forward pass, first {unread[0]}: the model uses "
                "them outside their module, or not at all. Leave them out of the subspace"
            )

    def deliver(self, index: int, source: int, x: Tensor, g: Tensor) -> None:
        """Pass the input and output gradient of a layer to the consumer; the backward of the identity calls this."""
        if self._consume is None:
            return
        again = (key := (index, self._rows.start)) in self._delivered
        self._delivered.add(key)
        layer, rows, texts = self.layers[index], 1 if self._one_row else self._num_rows, self._num_texts
        if layer.has_channels:
            x, g = x.unflatten(0, (rows, texts)), g.unflatten(0, (rows, texts))
            self._consume(LayerRecord(layer, source, x, g, self._rows, None, self._first, again, texts))
            return
        g = g.reshape(rows, -1, g.shape[-1])
        x = x.reshape(rows, -1, x.shape[-1]) if x.is_floating_point() else x.reshape(rows, -1)
        known = self._valid is not None and self._valid.shape == g.shape[:2]
        valid = self._valid if known and index not in self._of_images else None
        if layer.is_head and not self._one_row:
            known = self._terms is not None and self._terms.shape == g.shape[:2]
            valid = self._terms if known else g.ne(0).any(-1)  # a sequence classifier reads one position per row
        self._consume(LayerRecord(layer, source, x, g, self._rows, valid, self._first, again, texts))


def _input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a module, which may have been given by keyword."""
    return args[0] if args else next(iter(kwargs.values()))


class _Identity(torch.autograd.Function):
    """The identity y -> y. Its backward calls ``LayerHooks.deliver``."""

    @staticmethod
    def forward(ctx: Any, hooks: LayerHooks, index: int, source: int, x: Tensor, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.hooks, ctx.index, ctx.source = hooks, index, source
        ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.hooks.deliver(ctx.index, ctx.source, x, g)
        return None, None, None, None, g, None  # the pass reaches the anchor without a value, too


def pieces(batch: dict[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """Yield a batch in pieces of at most ``size`` rows; None means the whole batch.

    A batch with as many texts as positions is cut in two. In one piece, an output with positions first, or of a table
    of positions, could not be distinguished from an output with rows first.
    """
    rows, texts, positions = shape_of_texts(batch)
    size = min(size or rows, -(-rows // 2) if rows * texts == positions else rows)
    for start in range(0, rows, size):
        yield with_tensors(batch, partial(_cut, kept=slice(start, start + size), num_rows=rows))


def _cut(tensor: Tensor, *, kept: slice, num_rows: int) -> Tensor:
    return tensor[kept] if tensor.shape[:1] == (num_rows,) else tensor


def _head_of(paths: Iterable[str]) -> str | None:
    """Return the path of a classifier's output layer; None if there is none."""
    return min((path for path in paths if path.split(".")[-1] in ("score", "classifier")), key=len, default=None)
