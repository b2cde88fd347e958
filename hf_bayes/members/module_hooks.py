"""Taps on the modules that own random parameters: what went in and the gradient of what came out, as backward passes.

A tap is an identity in the graph whose backward hands (input, output gradient) to a consumer and forgets them. Its
input is a saved tensor like any other, so activation checkpointing drops and recomputes it. Random parameters need no
gradient of their own: everything that is made of one is made of (input, output gradient), row by row.

For the same model the ready-made libraries do less here: curvlinops (matrix-free products, K-FAC on nn.Linear) knows
neither Conv1D, norms and embeddings nor peft's factors, differentiates the loss of whole batches in its own loop, and
keeps logits of all positions; its products and traces would serve matrices that are never formed, and none here is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.members.trunk import num_positions_of, num_rows_of


class Tap:
    """A module that owns random parameters.

    Attributes:
        path: its name in the model.
        names: its own attribute -> the parameter's name in the layout.
        weight: name of its matrix, if the module multiplies by one and nobody else owns it; else None.
        transposed: whether that matrix is [in, out] (Conv1D).
        tied: names that another module owns, too.
        is_head: whether it gives the model's outputs.
    """

    def __init__(self, path: str, module: nn.Module, names: Mapping[str, str], tied: set[str]) -> None:
        self.path, self.module, self.names = path, module, dict(names)
        self.linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        self.transposed = isinstance(module, Conv1D)
        self.tied = tied & set(self.names.values())
        own = self.names.get("weight") if self.linear else None
        self.weight = None if own in self.tied else own
        self.is_head = False
        self.reader: nn.Module = module

    def row_gradients(self, x: Tensor, g: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """{name: [R, *shape]}: gradient of each row in the module's random parameters.

        Args:
            x: [R, P, in] what the module was given (embeddings: ids [R, P]).
            g: [R, P, out] gradient of what it returned.
            dtype: to work in.
        """
        if not self.linear:
            return self._through_own_forward(x, g, dtype)
        x, g, found = x.to(dtype), g.to(dtype), {}
        if "weight" in self.names:
            left, right = (x, g) if self.transposed else (g, x)
            found[self.names["weight"]] = left.mT @ right
        if "bias" in self.names:
            found[self.names["bias"]] = g.sum(1)
        return found

    def _through_own_forward(self, x: Tensor, g: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """By differentiating the module's own forward on one row after another: any family's norm or embedding."""
        rows = []
        for one, gradient in zip(x, g, strict=True):
            leaves = {name: getattr(self.module, name).detach().clone().requires_grad_() for name in self.names}
            with torch.enable_grad():
                y = _forward_with(self.module, leaves, one[None].detach())
            rows.append(torch.autograd.grad(y, list(leaves.values()), gradient[None].to(y.dtype)))
        return {
            name: torch.stack([row[index] for row in rows]).to(dtype) for index, name in enumerate(self.names.values())
        }


class Share(NamedTuple):
    """One module's part of a pull.

    Attributes:
        tap: whose.
        source: number of the input: taps that were given one tensor share it.
        x: [R, P, in] (embeddings: [R, P]).
        g: [R, P, out].
        rows: which rows of the batch these are.
        valid: [R, P] bool, False at padding; None where every position counts.
        first: whether it is the first pull of the batch, when inputs are new.
        again: whether the module has spoken of these rows already in this pull: the model calls it more than once.
    """

    tap: Tap
    source: int
    x: Tensor
    g: Tensor
    rows: slice
    valid: Tensor | None
    first: bool
    again: bool


class Taps:
    """All taps of a model.

    Args:
        model: what the names refer to, its forwards its own.
        names: parameter names of the layout.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        wanted = {id(parameters[name]): name for name in names}
        owned = []
        for path, module in model.named_modules():
            own = {k: wanted[id(p)] for k, p in module.named_parameters(recurse=False) if id(p) in wanted}
            if own:
                owned.append((path, module, own))
        uses = [name for _, _, own in owned for name in own.values()]
        tied = {name for name in uses if uses.count(name) > 1}
        self.taps = [Tap(path, module, own, tied) for path, module, own in owned]
        self._read_lora_inputs(model)
        head = _head_of(model)
        for tap in self.taps:
            tap.is_head = head is not None and tap.path.startswith(head)
        self.anchor = torch.zeros((), requires_grad=True)
        """A leaf that every tapped output depends on: backward towards it runs the taps and computes nothing else."""
        self._consume: Callable[[Share], None] | None = None
        self._first = True
        self._heard: set[tuple[int, int]] = set()
        self._called: set[int] = set()
        self._num_positions = 1
        self._num_rows, self._rows = 1, slice(None)
        self._valid: Tensor | None = None
        self._terms: Tensor | None = None
        self._one_row = False
        self._seen: list[tuple[Any, int]] = []
        self._sources: dict[int, int] = {}

    def _read_lora_inputs(self, model: nn.Module) -> None:
        """peft casts the input of A for each layer anew; the layer's own input tells which of them are one."""
        factors = {
            id(factor): layer
            for layer in model.modules()
            if isinstance(layer, LoraLayer)
            for factor in layer.lora_A.values()
        }
        for tap in self.taps:
            tap.reader = factors.get(id(tap.module), tap.module)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Tap every forward until the end of the block."""
        device = next(iter(self.taps)).module.parameters().__next__().device
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        handles = []
        for index, tap in enumerate(self.taps):
            handles.append(tap.reader.register_forward_pre_hook(self._reading(index), with_kwargs=True))
            handles.append(tap.module.register_forward_hook(self._tapping(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._consume, self._seen, self._sources = None, [], {}

    def begin(self, num_rows: int, num_positions: int, mask: Tensor | None, terms: Tensor | None = None) -> None:
        """A batch of rows; ``mask`` [B, T] is 0 at padding, ``terms`` [B, T] true at likelihood terms."""
        self._terms, self._num_positions = terms, num_positions
        self._num_rows, self._rows, self._one_row = num_rows, slice(0, num_rows), False
        self._valid = None if mask is None or mask.ndim != 2 else mask.bool()
        self._seen, self._sources = [], {}

    def listen(self, consume: Callable[[Share], None], *, first: bool) -> None:
        """Hand what the next backward passes bring to ``consume``: a pull begins."""
        self._consume, self._first, self._heard = consume, first, set()

    @contextmanager
    def one_row(self, row: int) -> Iterator[None]:
        """Forwards and backwards within the block are of positions of this row alone."""
        before = self._rows, self._one_row, self._valid
        self._rows, self._one_row, self._valid = slice(row, row + 1), True, None
        try:
            yield
        finally:
            self._rows, self._one_row, self._valid = before

    def _reading(self, index: int) -> Callable:
        def remember(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            self._seen = [(ref, source) for ref, source in self._seen if ref() is not None]
            self._sources[index] = next((source for ref, source in self._seen if ref() is x), index)
            if self._sources[index] == index:
                self._seen.append((weakref.ref(x), index))

        return remember

    def _tapping(self, index: int) -> Callable:
        def tap(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            x, rows = args[0], 1 if self._one_row else self._num_rows
            self._called.add(index)
            if isinstance(module, nn.Embedding) and output.shape[0] == 1 < rows:  # of positions: one answer for all
                x, output = x.expand(rows, *x.shape[1:]), output.expand(rows, *output.shape[1:])
            if not self._one_row:
                self._require_rows(index, output)
            return _Identity.apply(self, index, self._sources.get(index, index), x, output, self.anchor)

        return tap

    def _require_rows(self, index: int, output: Tensor) -> None:
        """Raise if what a module answered is not of the batch's rows, so that nobody knows whose gradient it has."""
        tokens = output.ndim == 2 and output.shape[0] == self._num_rows * self._num_positions  # row after row
        if output.shape[0] != self._num_rows and not tokens:
            raise ValueError(
                f"{next(iter(self.taps[index].names.values()))}: its module was called with {output.shape[0]} rows, "
                f"expected {self._num_rows}: the model puts positions first, shuffles rows (experts), or calls it on a "
                "table. Row gradients are not to be had there: leave it out of the subspace, or use estimator='hessian'"
            )

    def check_all_called(self) -> None:
        """To be called after a pass: of a random parameter that no forward read there is no curvature.

        Raises:
            ValueError: naming one that the model uses behind its module's back, or not at all.
        """
        unread = [name for i, tap in enumerate(self.taps) if i not in self._called for name in tap.names.values()]
        if unread:
            raise ValueError(
                f"{len(unread)} random parameters were not read in a forward pass, first {unread[0]}: the model uses "
                "them outside their module, or not at all. Leave them out of the subspace"
            )

    def deliver(self, index: int, source: int, x: Tensor, g: Tensor) -> None:
        """Called by the backward pass of a tap."""
        if self._consume is None:
            return
        key = (index, self._rows.start)
        again = key in self._heard
        self._heard.add(key)
        rows = 1 if self._one_row else self._num_rows
        g = g.reshape(rows, -1, g.shape[-1])
        x = x.reshape(rows, -1, x.shape[-1]) if x.is_floating_point() else x.reshape(rows, -1)
        valid = self._valid if self._valid is not None and self._valid.shape == g.shape[:2] else None
        tap = self.taps[index]
        if tap.is_head and not self._one_row:
            known = self._terms is not None and self._terms.shape == g.shape[:2]
            valid = self._terms if known else g.ne(0).any(-1)  # of a sequence one is read
        self._consume(Share(tap, source, x, g, self._rows, valid, self._first, again))


class _Identity(torch.autograd.Function):
    """y, whose backward tells the taps."""

    @staticmethod
    def forward(ctx: Any, taps: Taps, index: int, source: int, x: Tensor, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.taps, ctx.index, ctx.source = taps, index, source
        ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        ctx.taps.deliver(ctx.index, ctx.source, x, g)
        return None, None, None, None, g, g.new_zeros(())


def pieces(batch: dict[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """A batch in pieces of at most ``size`` rows; whole if that is None, or in two if it has as many rows as positions.

    For then what a module answers with positions first, or for a table of them, would have the shape of these rows.
    """
    rows = num_rows_of(batch)
    size = min(size or rows, -(-rows // 2) if rows == num_positions_of(batch) else rows)
    for start in range(0, rows, size):
        rest = slice(start, start + size)
        yield {k: v[rest] if isinstance(v, Tensor) and v.ndim and len(v) == rows else v for k, v in batch.items()}


def _forward_with(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """The class's own forward, without hooks, reading ``values`` in place of the module's parameters."""
    try:
        module.__dict__.update(values)  # found before nn.Module.__getattr__ looks among the parameters
        return type(module).forward(module, x)
    finally:
        for name in values:
            module.__dict__.pop(name, None)


def _head_of(model: nn.Module) -> str | None:
    """The path of a classifier's output layer."""
    paths = [path for path, _ in model.named_modules() if path.split(".")[-1] in ("score", "classifier")]
    return min(paths, key=len, default=None)
