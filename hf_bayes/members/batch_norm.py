"""Batch normalisation with a member axis.

Each member has statistics of its own: the rows of one member never enter the statistics of another one.

* In training, a member's activations are normalised by the mean and variance over its rows of the batch.
* A prediction uses the running statistics that ``models.statistics`` has estimated for each member. They stand in theta
  behind the random parameters, so they are saved, loaded and chosen together with them.
* Members without such statistics (of a model that has just been attached) use the statistics of the model.

A layer whose weight and bias are frozen is frozen as a whole. It uses the statistics of the model, in training, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_bayes.core.layout import Layout
from hf_bayes.members.context import Context
from hf_bayes.members.stacked_module import Stacked

KINDS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d)
"""The layers that may be random."""

_FREEZABLE: tuple[type[nn.Module], ...] = (*KINDS, nn.BatchNorm3d, nn.SyncBatchNorm)

STATISTICS = ("running_mean", "running_var")
"""The buffers of a layer that predictions use."""


class StackedBatchNorm(Stacked):
    """A stacked nn.BatchNorm1d or nn.BatchNorm2d, with scale, shift and statistics per member.

    Attributes:
        statistics: the names of its running mean and variance in theta.
        collected: the mean and unbiased variance [M, C] over the rows of a member, if ``collects``.
        collects: True if the statistics of the next forward are wanted.
    """

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        _require_statistics(module, next(iter(names.values())))
        self.statistics = [names[name] for name in STATISTICS]
        self.collects = False
        self.collected: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        context, single = self.context, self.single(x)
        x = x if single is None else context.repeat(single)
        rows = x.unflatten(0, (context.num_members, -1))  # [M, B, C, ...]
        wide = rows if rows.dtype == torch.float64 else rows.float()
        others = [1, *range(3, rows.ndim)]
        if self.statistics[0] in context.tensors:
            mean, var = (self.tensor(name) for name in STATISTICS)
        elif context.batch_statistics:
            var, mean = torch.var_mean(wide, others, correction=0)
            if self.collects:
                count = wide[0].numel() // wide.shape[2]
                self.collected = mean.detach(), var.detach() * count / max(1, count - 1)
        else:
            mean, var = (self.parameter(name).expand(context.num_members, -1) for name in STATISTICS)
        scale = self.tensor("weight") * (var + self.module.eps).rsqrt()
        shape = [context.num_members, 1, -1, *[1] * (rows.ndim - 3)]
        y: Tensor = (wide - mean.view(shape)) * scale.view(shape) + self.tensor("bias").view(shape)
        return y.to(x.dtype).flatten(0, 1)


class FrozenBatchNorm(Stacked):
    """The replacement of the forward of a frozen layer: the statistics of the model, also in training mode."""

    def __init__(self, module: Any, path: str, context: Context) -> None:
        super().__init__(module, {}, context)
        _require_statistics(module, path)

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        mean, var = (getattr(module, name) for name in STATISTICS)
        return F.batch_norm(x, mean, var, module.weight, module.bias, training=False, eps=module.eps)


def statistics_layout(model: nn.Module, names: Mapping[int, str]) -> Layout:
    """Return the layout of the statistics of all random layers of batch normalisation, named as buffers of the model.

    Args:
        names: id of each random parameter -> its name.
    """
    layers = [path for path, module in model.named_modules() if type(module) in KINDS and _is_random(module, names)]
    buffers = dict(model.named_buffers())
    found = {name: tuple(buffers[name].shape) for path in layers for name in (f"{path}.{s}" for s in STATISTICS)}
    return Layout(tuple(found), tuple(found.values()))


def refuse_without_place(model: nn.Module, core: Any, statistics: Layout) -> None:
    """Raise a ValueError if statistics of members could not be stored, or would not be used in training.

    Args:
        model: the model with its adapter, if it has one; a posterior on an adapter has files for the adapter alone.
        core: the model without an adapter. A language model is trained by positions, not by whole batches.
        statistics: the layout of the statistics.
    """
    writes = getattr(core, "can_generate", None)
    if statistics.names and (model is not core or (writes is not None and writes())):
        kind = "a model with an adapter" if model is not core else f"the language model {type(core).__name__}"
        raise ValueError(
            f"{statistics.names[0]}: batch normalisation cannot be random in {kind}: leave its weight and bias out of "
            "the subspace, and the layer keeps the statistics of the base model"
        )


def frozen_batch_norms(model: nn.Module, names: Mapping[int, str], context: Context) -> list[FrozenBatchNorm]:
    """Return a replacement for each layer of batch normalisation without random parameters."""
    return [FrozenBatchNorm(module, path, context) for path, module in _layers(model) if not _is_random(module, names)]


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of all layers of batch normalisation, by their names in the model."""
    names = {f"{path}.{name}" for path, _ in _layers(model) for name in STATISTICS}
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by their names, without those of layers of batch normalisation."""
    stored, layers = model.state_dict().keys(), {path for path, _ in _layers(model)}
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in named if name in stored and name.rpartition(".")[0] not in layers}


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of each layer of batch normalisation."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, _FREEZABLE))


def _is_random(module: nn.Module, names: Mapping[int, str]) -> bool:
    return any(id(parameter) in names for parameter in module.parameters(recurse=False))


def _require_statistics(module: Any, name: str) -> None:
    """Check that a layer has running statistics; without them a prediction would depend on the other rows of its batch.

    Raises:
        ValueError: naming the layer.
    """
    if module.running_mean is None:
        raise ValueError(
            f"{name}: a layer of batch normalisation without running statistics (track_running_stats=False) is not "
            "supported: its predictions for an input depend on the other inputs of the batch. Use "
            "track_running_stats=True"
        )
