"""Modules whose weights carry a member axis. Each borrows a live module: only its ``forward`` is replaced, and given back.

Frozen weights do one GEMM for all folded rows, random ones a batched matmul over members. Where the rows of all members
are still alike (``Context.single``) frozen work is done once for B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.members.context import Context, cast, unfold

SUPPORTED = (
    "torch.nn.Linear, transformers' Conv1D, LayerNorm, RMSNorm, Embedding, and peft LoRA on linear layers "
    "(rsLoRA included)"
)


class Stacked:
    """A replaced forward. Subclasses define ``forward`` over the members' tensors."""

    def __init__(self, module: nn.Module, names: Mapping[str, str], context: Context) -> None:
        self.module, self.names, self.context = module, dict(names), context

    def tensor(self, attribute: str) -> Tensor:
        """[M, *shape] of one of the module's own parameters."""
        return self.context.members_of(getattr(self.module, attribute), self.names.get(attribute))

    def install(self) -> None:
        self.module.forward = self.forward  # an instance attribute shadows the class's forward; deepcopy rebinds it

    def remove(self) -> None:
        self.module.__dict__.pop("forward", None)

    def forward(self, *args, **kwargs) -> Tensor:
        raise AssertionError("a Stacked module defines forward")


class StackedLinear(Stacked):
    """nn.Linear and GPT-2's Conv1D (whose weight is [in, out]) with weight and bias of their own for each member."""

    def forward(self, x: Tensor) -> Tensor:
        context, single = self.context, self.context.single(x)
        weight = self.tensor("weight")
        weight = weight.mT if isinstance(self.module, Conv1D) else weight  # [M, out, in]
        weight = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        bias = None if getattr(self.module, "bias", None) is None else self.tensor("bias").to(weight.dtype)
        if single is not None:
            rows = single.reshape(-1, single.shape[-1])
            y = F.linear(rows, weight.reshape(-1, weight.shape[-1]))  # [R, M * out]: one GEMM for all members
            y = y.unflatten(-1, (context.num_members, -1)).transpose(0, 1)
            return unfold(y if bias is None else y + bias[:, None], single, context.num_members)
        folded = context.fold(x)
        y = torch.bmm(folded, weight.mT) if bias is None else torch.baddbmm(bias[:, None], folded, weight.mT)
        return unfold(y, x, context.num_members)


class StackedLora(Stacked):
    """peft's LoRA on a linear layer: base(x) + (alpha / r) B_m A_m x, with peft's own scaling, dropout and base layer."""

    def __init__(self, module: nn.Module, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        self.adapter = module.active_adapters[0]

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        layer, context, adapter = self.module, self.context, self.adapter
        a = context.members_of(layer.lora_A[adapter].weight, self.names.get("lora_A"))  # [M, r, in]
        b = context.members_of(layer.lora_B[adapter].weight, self.names.get("lora_B"))  # [M, out, r]
        scaling, dropout = layer.scaling[adapter], layer.lora_dropout[adapter]
        single = context.single(x)
        source = x if single is None else single
        base = layer.base_layer(source, *args, **kwargs)
        low = cast(dropout(source), a.dtype)
        if single is None:
            low, y = torch.bmm(context.fold(low), a.mT), context.fold(base)
        else:
            low = F.linear(low.reshape(-1, low.shape[-1]), a.reshape(-1, a.shape[-1]))  # [R, M * r]
            low = low.unflatten(-1, (context.num_members, -1)).transpose(0, 1)
            y = base.reshape(1, -1, base.shape[-1])
        if y.dtype != low.dtype or low.dtype != b.dtype:
            return unfold(y + (torch.bmm(low, b.mT.to(low.dtype)) * scaling).to(y.dtype), base, context.num_members)
        if single is None and not torch.is_grad_enabled():
            # base is this call's own output and nobody else's: adding in place saves a pass over memory
            return y.baddbmm_(low, b.mT, alpha=scaling).reshape(base.shape)
        return unfold(torch.baddbmm(y, low, b.mT, alpha=scaling), base, context.num_members)


class StackedNorm(Stacked):
    """LayerNorm and RMSNorm, torch's and every model family's own: their forward with the weights of each member."""

    def forward(self, x: Tensor) -> Tensor:
        context, module = self.context, self.module
        single = context.single(x)
        x = x if single is None else context.repeat(single)
        lead = x.unflatten(0, (context.num_members, -1))
        shape = (context.num_members, *[1] * (lead.ndim - 2), x.shape[-1])
        values = {name: self.tensor(name).reshape(shape) for name, p in module.named_parameters() if p is not None}
        if isinstance(module, nn.LayerNorm):
            y = F.layer_norm(lead, module.normalized_shape, None, None, module.eps)
        elif isinstance(module, nn.RMSNorm):
            y = F.rms_norm(lead, module.normalized_shape, None, module.eps)
        else:
            return self._own_forward(lead, values).flatten(0, 1)
        y = y if "weight" not in values else y * values["weight"].to(y.dtype)
        return (y if "bias" not in values else y + values["bias"].to(y.dtype)).flatten(0, 1)

    def _own_forward(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
        """The family's own code (Gemma multiplies by 1 + weight), reading weights that broadcast over members."""
        try:
            self.module.__dict__.update(values)  # found before nn.Module.__getattr__ looks among the parameters
            return type(self.module).forward(self.module, x)
        finally:
            for name in values:
                self.module.__dict__.pop(name, None)


class StackedEmbedding(Stacked):
    """nn.Embedding with a table for each member; ids arrive folded."""

    def forward(self, ids: Tensor) -> Tensor:
        context, table = self.context, self.tensor("weight")  # [M, V, h]
        alike = ids.shape[0] != context.num_members * context.num_rows  # position ids come as [1, T], for all rows
        lead = ids.expand(context.num_rows, *ids.shape[1:]) if alike else ids.unflatten(0, (context.num_members, -1))
        member = torch.arange(context.num_members, device=ids.device).view(-1, *[1] * ids.ndim)
        return F.embedding(lead + member * table.shape[1], table.flatten(0, 1)).flatten(0, 1)


def stack(root: nn.Module, names: Mapping[int, str], context: Context) -> list[Stacked]:
    """One Stacked for every module that owns a random parameter.

    Args:
        root: the model.
        names: id of each random parameter -> its name in the layout (tied parameters share the id).
        context: where they find their members.
    Raises:
        ValueError: naming the first module that cannot be stacked and what can.
    """
    found: list[Stacked] = []
    claimed: set[int] = set()
    for path, module in root.named_modules():
        if isinstance(module, LoraLayer) and any(id(p) in names for p in _adapter_parameters(module)):
            _refuse_lora(path, module)
            adapter = module.active_adapters[0]
            factors = {"lora_A": module.lora_A[adapter].weight, "lora_B": module.lora_B[adapter].weight}
            claimed |= {id(child) for child in (module.lora_A[adapter], module.lora_B[adapter])}
            found.append(
                StackedLora(module, {k: names[id(p)] for k, p in factors.items() if id(p) in names}, context)
            )
    for path, module in root.named_modules():
        own = {k: names[id(p)] for k, p in module.named_parameters(recurse=False) if id(p) in names}
        if own and id(module) not in claimed:
            found.append(_stacked_class(path, module, own)(module, own, context))
    return found


def _stacked_class(path: str, module: nn.Module, own: Mapping[str, str]) -> Callable[..., Stacked]:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return StackedNorm
    if type(module) is nn.Linear or isinstance(module, Conv1D):
        return StackedLinear
    if type(module) is nn.Embedding:
        return StackedEmbedding
    kind = "a peft layer that is" if isinstance(module, BaseTunerLayer) else "a module that is"
    raise ValueError(
        f"{path or 'the model'} ({type(module).__module__}.{type(module).__name__}, parameters {sorted(own)}) is {kind} "
        f"not supported as random. Supported: {SUPPORTED}. Freeze it, or choose another subspace"
    )


def _adapter_parameters(layer: LoraLayer) -> list[nn.Parameter]:
    return [
        parameter
        for name in layer.adapter_layer_names
        if isinstance(child := getattr(layer, name), (nn.ModuleDict, nn.ParameterDict))
        for parameter in child.parameters()
    ]


def _refuse_lora(path: str, layer: LoraLayer) -> None:
    """Raise for everything on a LoRA layer that stacking would silently leave out."""
    adapters = layer.active_adapters
    reasons = []
    if not isinstance(layer, LoraLinear) and "Linear" not in type(layer).__name__:
        reasons.append(f"LoRA on {type(layer.get_base_layer()).__name__}")
    if len(adapters) != 1:
        reasons.append(f"{len(adapters)} active adapters {adapters}")
    if layer.merged:
        reasons.append("a merged adapter (call unmerge_adapter first)")
    variant = next((layer.lora_variant[a] for a in adapters if a in getattr(layer, "lora_variant", {})), None)
    if variant is not None:
        reasons.append(f"the LoRA variant {type(variant).__name__} (DoRA and its like)")
    if any(getattr(layer.lora_B[a], "bias", None) is not None for a in adapters if a in layer.lora_B):
        reasons.append("lora_bias=True")
    if reasons:
        raise ValueError(f"{path}: {', '.join(reasons)} is not supported as random. Supported: {SUPPORTED}")
