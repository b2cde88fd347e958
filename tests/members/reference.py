"""A brute-force reference: M ordinary models, one after another, in place of a member axis."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from hf_bayes.core.layout import Layout, initial, select
from tests.members.subjects import SUBJECTS


def core_of(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def scattered(model: nn.Module, layout: Layout, num_members: int = 3, std: float = 0.2, seed: int = 0) -> Tensor:
    """Return members [M, d] that differ so much that their mixture is not close to the mean of their logits."""
    start = initial(model, layout)
    noise = torch.randn((num_members, layout.dim), generator=torch.Generator().manual_seed(seed), dtype=start.dtype)
    return start + std * noise


@contextmanager
def showing(model: nn.Module, layout: Layout, row: Tensor) -> Iterator[None]:
    """Copy the weights of one member into the live model, in its dtype."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: parameters[name].detach().clone() for name in layout.names}
    with torch.no_grad():
        for name, value in layout.unflatten(row).items():
            parameters[name].copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                parameters[name].copy_(value)


@torch.no_grad()
def separate_logits(model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Return [M, B, ...]."""
    logits = []
    for row in theta:
        with showing(model, layout, row):
            logits.append(core_of(model)(**inputs, **uncached(core_of(model))).logits)
    return torch.stack(logits)


def uncached(core: nn.Module) -> dict[str, bool]:
    """Return the keywords that switch off the cache of a model, if it has one."""
    return {} if core.main_input_name in ("pixel_values", "input_values") else {"use_cache": False}


def padded_behind(core: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of texts with its padding at the end, where a classifier or tagger reads a row as it is alone."""
    mask = batch.get("attention_mask")
    if mask is None or core.can_generate() or getattr(core.config, "summary_type", None) == "last":
        return dict(batch)
    order = mask.sort(dim=1, descending=True, stable=True).indices
    return {name: value.gather(1, order) if value.shape == mask.shape else value for name, value in batch.items()}


def separate_gradients(
    model: nn.Module, layout: Layout, theta: Tensor, batches: list[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return minus the summed log-likelihood [M] of each member on its own batch, and the gradient [M, d]."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    losses, gradients = [], []
    for row, batch in zip(theta, batches, strict=True):
        inputs = padded_behind(core_of(model), batch)
        labels = inputs.pop("labels")
        forward = inspect.signature(core_of(model).forward).parameters
        axes = core_of(model).config.model_type == "qwen2_vl"  # the model derives its positions from the images
        if (
            core_of(model).can_generate() and "position_ids" in forward and not axes
        ):  # from a row's first token, as generate has it
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        settings = without_padding_index(model), by_batch_statistics(model, layout)
        with showing(model, layout, row), requiring_grad(model, layout), settings[0], settings[1]:
            logits = core_of(model)(**inputs).logits
            if core_of(model).can_generate():
                logits, labels = logits[:, :-1], labels[:, 1:]
            logits, labels = logits.flatten(0, -2), labels.flatten()
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            found = torch.autograd.grad(loss, [parameters[name] for name in layout.names], materialize_grads=True)
        losses.append(loss.detach())
        gradients.append(layout.flatten(dict(zip(layout.names, found, strict=True))))
    return torch.stack(losses), torch.stack(gradients)


@contextmanager
def requiring_grad(model: nn.Module, layout: Layout) -> Iterator[None]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: parameters[name].requires_grad for name in layout.names}
    for name in layout.names:
        parameters[name].requires_grad_(True)
    try:
        yield
    finally:
        for name, value in before.items():
            parameters[name].requires_grad_(value)


@contextmanager
def by_batch_statistics(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Let random batch normalisation take the statistics of the batch, as in training, without updating its own."""
    random = [
        (module, module.momentum)
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) and f"{path}.weight" in layout.names
    ]
    for module, _ in random:
        module.training, module.momentum = True, 0.0
    try:
        yield
    finally:
        for module, momentum in random:
            module.training, module.momentum = False, momentum


@contextmanager
def without_padding_index(model: nn.Module) -> Iterator[None]:
    """Include the gradient of the padding row, which nn.Embedding drops and the likelihood has."""
    before = {module: module.padding_idx for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in before:
        module.padding_idx = None
    try:
        yield
    finally:
        for module, value in before.items():
            module.padding_idx = value


def mixture(logits: Tensor) -> Tensor:
    """Return the log of the mixture in float64, [M, ..., V] -> [..., V]."""
    return logits.double().log_softmax(-1).logsumexp(0) - math.log(len(logits))


def entropies(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, aleatoric and epistemic uncertainty of logits [M, ..., V], in float64."""
    log_probs = logits.double().log_softmax(-1)
    total = torch.special.entr(mixture(logits).exp()).sum(-1)
    aleatoric = torch.special.entr(log_probs.exp()).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value, for a whole tensor."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def prepared(name: str, dtype: torch.dtype = torch.float32, num_members: int = 3) -> tuple[nn.Module, Layout, Tensor]:
    model = SUBJECTS[name].make(dtype)
    layout = select(model, SUBJECTS[name].subspace)
    return model, layout, scattered(model, layout, num_members)
