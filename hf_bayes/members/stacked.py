"""Stacked modules, whose random weights have a member axis: they replace the ``forward`` of live modules.

Frozen weights take one matrix product for all folded rows; random weights take a batched product over members. Where
the rows of all members are still equal (``Context.single``), frozen work is done once for B rows.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.core import compat
from hf_bayes.core.layout import modules_of
from hf_bayes.members.batch_norm import KINDS as BATCH_NORMS
from hf_bayes.members.batch_norm import STATISTICS, StackedBatchNorm
from hf_bayes.members.context import Context
from hf_bayes.members.convolution import CONVOLUTIONS, StackedConvolution
from hf_bayes.members.stacked_module import Stacked

SUPPORTED = (
    "torch.nn.Linear, transformers' Conv1D, Conv1d, Conv2d, LayerNorm, RMSNorm, BatchNorm1d, BatchNorm2d, Embedding, "
    "and peft LoRA on linear layers (rsLoRA included)"
)


class StackedLinear(Stacked):
    """A stacked nn.Linear, with a weight and a bias per member."""

    def weight(self) -> Tensor:
        """Return the weights, [M, out, in]."""
        return self.tensor("weight")

    def forward(self, x: Tensor) -> Tensor:
        context, single = self.context, self.single(x)
        weight = self.weight()  # [M, out, in]
        weight = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        bias = None if getattr(self.module, "bias", None) is None else self.tensor("bias").to(weight.dtype)
        if single is not None:
            rows = single.reshape(-1, single.shape[-1])
            y = F.linear(rows, weight.reshape(-1, weight.shape[-1]))  # [R, M * out]: one GEMM for all members
            y = torch.unflatten(y, -1, (context.num_members, -1)).transpose(0, 1)
            return unfold(y if bias is None else y + bias[:, None], single, context.num_members)
        folded = fold(x, context.num_members)
        y = torch.bmm(folded, weight.mT) if bias is None else torch.baddbmm(bias[:, None], folded, weight.mT)
        return unfold(y, x, context.num_members)


class StackedConv1D(StackedLinear):
    """A stacked Conv1D of GPT-2: a linear layer whose weight is [in, out]."""

    def weight(self) -> Tensor:
        return self.tensor("weight").mT


class StackedLora(Stacked):
    """A stacked LoRA layer, base(x) + (alpha / r) B_m A_m x. Scaling, dropout and base layer are peft's own."""

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        self.adapter = adapter = module.active_adapters[0]
        # looked up once: each access to a module container takes time, and a token passes through all layers
        self.factors = {"lora_A": module.lora_A[adapter], "lora_B": module.lora_B[adapter]}
        self.dropout = module.lora_dropout[adapter]
        self.has_stacked_base = False
        """True if the base layer has random parameters, too, such as its bias."""

    def parameter(self, attribute: str) -> Tensor:
        weight: Tensor = self.factors[attribute].weight
        return weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, context, dropout, members = self.module, self.context, self.dropout, self.context.num_members
        single = self.single(x)
        source = x if single is None else single
        if layer.merged:
            raise ValueError(
                f"{next(iter(self.names.values()))}: its adapter has been merged into the base model, and the adapters "
                "of the members would be added to it. Call unmerge_adapter() first"
            )
        # a stacked base layer finds the equal rows itself
        base = layer.base_layer(x if self.has_stacked_base else source, *args, **kwargs)
        a, b = self.tensor("lora_A"), self.tensor("lora_B")  # [M, r, in], [M, out, r]
        if layer.disable_adapters:
            return base if self.has_stacked_base or single is None else context.repeat(base)
        scaling = layer.scaling[self.adapter]
        low = cast(dropout(source) if dropout.training else source, a.dtype)
        if single is None:
            low, y = torch.bmm(fold(low, members), a.mT), fold(base, members)
        else:
            low = F.linear(low.reshape(-1, low.shape[-1]), a.reshape(-1, a.shape[-1]))  # [R, M * r]
            low = torch.unflatten(low, -1, (members, -1)).transpose(0, 1)
            y = fold(base, members) if self.has_stacked_base else base.reshape(1, -1, base.shape[-1])
        if y.dtype != low.dtype or low.dtype != b.dtype:
            return unfold(y + (torch.bmm(low, b.mT.to(low.dtype)) * scaling).to(y.dtype), base, members)
        if single is None and not torch.is_grad_enabled():
            # base was computed in this call and no other code holds it, so adding in place is safe and saves memory
            y.baddbmm_(low, b.mT, alpha=scaling)
            return y if y is base else y.reshape(base.shape)
        return unfold(torch.baddbmm(y, low, b.mT, alpha=scaling), base, members)


class StackedNorm(Stacked):
    """A stacked LayerNorm or RMSNorm, of torch or of a model family, with weights per member."""

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        own = type(module).forward
        # a class with a data_format is torch's LayerNorm on channels that come first or last (ConvNeXt)
        self.computes_as_torch = own in (nn.LayerNorm.forward, nn.RMSNorm.forward) or hasattr(module, "data_format")

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.module, "data_format", "channels_last") == "channels_first":  # ConvNeXt
            return self._normalise(x.movedim(1, -1)).movedim(-1, 1)
        return self._normalise(x)

    def _normalise(self, x: Tensor) -> Tensor:
        context, module = self.context, self.module
        single = self.single(x)
        x = x if single is None else context.repeat(single)
        lead = torch.unflatten(x, 0, (context.num_members, -1))
        if not self.computes_as_torch and isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return self._one_by_one(lead)
        values = {
            name: self.tensor(name).view(context.num_members, *[1] * (x.ndim - p.ndim), *p.shape).to(p.dtype)
            for name, p in module.named_parameters()
        }
        wide = lead if lead.dtype == torch.float64 else lead.float()  # as in torch: round once, after weight and bias
        match module:
            case nn.LayerNorm():
                y = F.layer_norm(wide, module.normalized_shape, None, None, module.eps)
            case nn.RMSNorm():
                y = F.rms_norm(wide, module.normalized_shape, None, module.eps or torch.finfo(lead.dtype).eps)
            case _:
                # the family's own forward (Gemma multiplies by 1 + weight), with weights that broadcast over members
                return compat.forward_with(module, values, lead).flatten(0, 1)
        y = y if "weight" not in values else y * values["weight"]
        y = y if "bias" not in values else y + values["bias"]
        return cast(y, lead.dtype).flatten(0, 1)

    def _one_by_one(self, lead: Tensor) -> Tensor:
        """Run the forward of a subclass once per member: torch's function in it takes the weights of one member only.

        Nemotron multiplies by 1 + weight, SqueezeBert has the channels before the positions.
        """
        values = {name: self.tensor(name).to(p.dtype) for name, p in self.module.named_parameters()}
        return torch.cat(
            [
                compat.forward_with(self.module, {name: value[member] for name, value in values.items()}, rows)
                for member, rows in enumerate(lead)
            ]
        )


class StackedEmbedding(Stacked):
    """A stacked nn.Embedding (also scaled, as in Gemma) with one table per member. Its input ids are folded.

    Its gradient includes the row of ``padding_idx``, which the gradient of nn.Embedding leaves out.
    """

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        own_name = names["weight"].split(".")[-2:][0]
        # a table of relative positions has the indices [T, T] (distance_embedding of Wav2Vec2-BERT, rel_attn_embed)
        self.of_distances = any(word in own_name for word in ("distance", "relative", "rel_"))

    def forward(self, ids: Tensor) -> Tensor:
        context, module, table = self.context, self.module, self.tensor("weight")  # [M, V, h]
        self.require_member_rows(ids, also=1)
        if self.of_distances and context.num_members > 1 and ids.shape[0] == ids.shape[-1]:
            # T = M * B: the T rows of these indices are no rows of members
            raise ValueError(self.shuffled(f"the distances of {len(ids)} positions"))
        shared = ids.shape[0] == 1 < context.num_members * context.num_rows  # position ids are [1, T], for all rows
        members = context.num_members
        lead = ids.expand(context.num_rows, *ids.shape[1:]) if shared else torch.unflatten(ids, 0, (members, -1))
        member = torch.arange(context.num_members, device=ids.device).view(-1, *[1] * ids.ndim)
        y = F.embedding(lead + member * table.shape[1], table.flatten(0, 1)).flatten(0, 1).to(module.weight.dtype)
        scale: Any = getattr(module, "embed_scale", None)
        return y if scale is None else y * (scale.to(y.dtype) if isinstance(scale, Tensor) else scale)


def fold(x: Tensor, num_members: int) -> Tensor:
    """Reshape [M * R, ..., k] to [M, R * ..., k]; ``x`` of that shape is returned unchanged."""
    if x.ndim == 3 and x.shape[0] == num_members:
        return x
    return x.reshape(num_members, -1, x.shape[-1])


def unfold(y: Tensor, like: Tensor, num_members: int) -> Tensor:
    """Reshape [M, R * ..., k] to [M * R, ..., k]. ``like`` has the dimensions: [R, ..., *] or [M * R, ..., *]."""
    rows = y.shape[0] * y.shape[1] // math.prod(like.shape[1:-1])
    return y.reshape(rows, *like.shape[1:-1], y.shape[-1])


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``; under autocast return it unchanged, because autocast casts itself."""
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def refuse_attached(root: nn.Module) -> None:
    """Check that no module of the model has a stacked forward already, because member axes do not nest.

    Raises:
        ValueError: if a module has.
    """
    forwards = (vars(module).get("forward") for module in root.modules())
    if any(isinstance(getattr(forward, "__self__", None), Stacked) for forward in forwards):
        raise ValueError("this model is attached already: detach() the BayesianModel that holds it first")


def stack(root: nn.Module, names: Mapping[int, str], context: Context) -> list[Stacked]:
    """Return one ``Stacked`` for every module that owns a random parameter.

    Args:
        root: the model.
        names: id of each random parameter -> its name in the layout (tied parameters share the id).
        context: the context that holds the members.
    Raises:
        ValueError: naming the first module that cannot be stacked, and the supported kinds.
    """
    refuse_attached(root)
    found: list[Stacked] = []
    claimed: set[int] = set()
    for path, module in modules_of(root, BaseTunerLayer).items():
        if any(id(p) in names for p in _adapter_parameters(module)):
            layer = _supported_lora(path, module, names)
            adapter = layer.active_adapters[0]
            children: dict[str, Any] = {"lora_A": layer.lora_A[adapter], "lora_B": layer.lora_B[adapter]}
            claimed |= {id(child) for child in children.values()}
            own = {k: names[id(child.weight)] for k, child in children.items() if id(child.weight) in names}
            lora = StackedLora(layer, own, context)
            lora.has_stacked_base = any(id(p) in names for p in layer.get_base_layer().parameters())
            found.append(lora)
    for path, module in root.named_modules():
        own = {k: names[id(p)] for k, p in module.named_parameters(recurse=False) if id(p) in names}
        if own and id(module) not in claimed:
            kind = _stacked_class(path, module, own)
            if kind is StackedBatchNorm:
                own |= {name: f"{path}.{name}" for name in STATISTICS}
            found.append(kind(module, own, context))
    _warn_of_unmatched_targets(root)
    return found


def _stacked_class(path: str, module: nn.Module, own: Mapping[str, str]) -> Callable[..., Stacked]:
    if _is_norm(module):
        return StackedNorm
    if type(module) is nn.Linear:
        return StackedLinear
    if isinstance(module, Conv1D):
        return StackedConv1D
    if type(module) in CONVOLUTIONS:
        return StackedConvolution
    if type(module) in BATCH_NORMS:
        return StackedBatchNorm
    if type(module) is nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding"):
        return StackedEmbedding
    raise ValueError(
        f"{path or 'the model'} ({type(module).__module__}.{type(module).__name__}, parameters {sorted(own)}) is not "
        f"supported as random. Supported: {SUPPORTED}. Freeze it, or choose another subspace"
    )


def _is_norm(module: nn.Module) -> bool:
    """Check for a norm of one input. Norms of a second one, such as the scaling factor of I-BERT, are none of these."""
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm", "FilterResponseNorm"))
    norm = named or isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    return norm and len(inspect.signature(type(module).forward).parameters) == 2


def _adapter_parameters(layer: BaseTunerLayer) -> list[nn.Parameter]:
    return [
        parameter
        for name in layer.adapter_layer_names
        if isinstance(child := getattr(layer, name), (nn.ModuleDict, nn.ParameterDict))
        for parameter in child.parameters()
    ]


def _warn_of_unmatched_targets(root: nn.Module) -> None:
    """Warn of ``target_modules`` that match no module; peft accepts them if at least one other matches."""
    if not isinstance(root, PeftModel):
        return
    targets = getattr(root.peft_config[root.active_adapter], "target_modules", None)
    adapted = ["." + path for path in modules_of(root, BaseTunerLayer)]
    unmatched = [
        target
        for target in (sorted(targets) if isinstance(targets, (set, list, tuple)) else ())
        if not any(path.endswith("." + target) for path in adapted)
    ]
    if unmatched:
        warnings.warn(
            f"target_modules {unmatched} of the adapter match no module of "
            f"{type(root.get_base_model()).__name__}: nothing is random there. Correct the names, or leave them out"
        )


def _supported_lora(path: str, layer: BaseTunerLayer, names: Mapping[int, str]) -> LoraLayer:
    """Return the layer if it is a LoRA layer without any feature that stacking would silently ignore.

    Raises:
        ValueError: naming the layer and the feature.
    """
    if not isinstance(layer, LoraLayer):
        raise ValueError(
            f"{path} ({type(layer).__module__}.{type(layer).__name__}) is an adapter not supported as random. "
            f"Supported: {SUPPORTED}"
        )
    if isinstance(layer.lora_A, nn.ParameterDict):  # AdaLoRA: its factors are parameters, with a third one between them
        raise ValueError(
            f"{path} ({type(layer).__module__}.{type(layer).__name__}, AdaLoRA) is an adapter not supported as random: "
            f"its ranks change while it is trained. Supported: {SUPPORTED}"
        )
    adapters = layer.active_adapters
    reasons = []
    if not isinstance(layer, LoraLinear) and "Linear" not in type(layer).__name__:
        reasons.append(f"LoRA on {type(layer.get_base_layer()).__name__} by peft's class {type(layer).__name__}")
    if len(adapters) != 1:
        reasons.append(f"{len(adapters)} active adapters {adapters}")
    if layer.merged:
        reasons.append("a merged adapter (call unmerge_adapter first)")
    if layer.disable_adapters:
        reasons.append("a disabled adapter (call enable_adapter_layers first)")
    variant = next((layer.lora_variant[a] for a in adapters if a in getattr(layer, "lora_variant", {})), None)
    if variant is not None:
        reasons.append(f"the LoRA variant {type(variant).__name__} (DoRA and its like)")
    if any(getattr(layer.lora_B[a], "bias", None) is not None for a in adapters if a in layer.lora_B):
        reasons.append("lora_bias=True")
    read = {id(factors[a].weight) for factors in (layer.lora_A, layer.lora_B) for a in adapters if a in factors}
    unread = [names[id(p)] for p in _adapter_parameters(layer) if id(p) in names and id(p) not in read]
    if unread and not reasons:
        reasons.append(f"{unread[0]}, no factor A or B of the active adapter {adapters[0]},")
    if reasons:
        raise ValueError(f"{path}: {', '.join(reasons)} is not supported as random. Supported: {SUPPORTED}")
    return layer
