"""Decoding with a KV cache, one row, greedy, all members reading the same tokens: time a token after the prompt."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bounds
from benchmarks.harness import Line, Settings, Work, compare, interleave, synchronize, timed
from benchmarks.models import WHERE, adapter_name, members, tokens
from hf_bayes import attach
from hf_bayes.members.small_batches import BlockedLinears

PROMPT, NEW = 64, 64


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    return [*_all_layers(settings), *_last_layer(settings), *_frozen_products(settings)]


def _all_layers(settings: Settings) -> list[Line]:
    subject, count, many = settings.subject, settings.num_members, 4 * settings.num_members
    plain = subject.plain()
    prompt = tokens(plain, 1, PROMPT)
    seconds = interleave(
        {
            "single": greedy(plain, prompt),
            "ours": greedy(bayesian(settings, count, WHERE[0]), prompt),
            "ours, 4 M": greedy(bayesian(settings, many, WHERE[0]), prompt),
            **_peft(settings, prompt, WHERE[0]),
        },
        settings.rounds,
    )
    work = f"decode, {NEW} new tokens, LoRA on all layers"
    others = ("set_adapter", "adapter_names")
    return [
        compare("decode", f"{work}, M={count}", seconds, limit=1.9, others=others,
                bound=bounds.decode(subject, WHERE[0], count, PROMPT + NEW // 2)),
        compare("decode", f"{work}, M={many}", seconds, ours="ours, 4 M", limit=4.0,
                bound=bounds.decode(subject, WHERE[0], many, PROMPT + NEW // 2)),
    ]  # fmt: skip


def _last_layer(settings: Settings) -> list[Line]:
    subject, count = settings.subject, settings.num_members
    plain, ours = subject.plain(), bayesian(settings, count, WHERE[1])
    prompt = tokens(plain, 1, PROMPT)
    others = _peft(settings, prompt, WHERE[1])
    seconds = interleave({"single": greedy(plain, prompt), "ours": greedy(ours, prompt), **others}, settings.rounds)
    work = f"decode, {NEW} new tokens, LoRA on the last layer, M={count}"
    kept = cache_bytes(ours, prompt) / cache_bytes(plain, prompt)
    layers = subject.fields["num_hidden_layers"]
    return [
        compare("decode", work, seconds, limit=1.25, others=tuple(others),
                bound=bounds.decode(subject, WHERE[1], count, PROMPT + NEW // 2)),
        Line("decode", f"{work}: KV cache", "x single", kept, limit=1.9, bound=(layers - 1 + count) / layers,
             others={"set_adapter": count}),
    ]  # fmt: skip


def _frozen_products(settings: Settings) -> list[Line]:
    """Return the lower bound of decoding on this machine: the base's linear layers alone, a row for each member."""
    plain, lent, count = settings.subject.plain(), settings.subject.plain(), settings.num_members
    BlockedLinears(lent, []).install()
    works = {"single": products(plain, 1)}
    for rows in (count, 4 * count):
        works |= {f"ours, {rows}": products(lent, rows), f"torch, {rows}": products(plain, rows)}
    seconds = interleave(works, 3 * settings.rounds)
    return [
        compare("decode", f"the frozen linear layers of one token alone, {rows} rows",
                {"single": seconds["single"], "ours": seconds[f"ours, {rows}"], "torch's": seconds[f"torch, {rows}"]},
                others=("torch's",))
        for rows in (count, 4 * count)
    ]  # fmt: skip


def products(model: nn.Module, rows: int) -> Work:
    """All linear layers of a model, one after the other, each on inputs of its own width."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    like = layers[0].weight
    inputs = {width: like.new_ones(rows, 1, width) for width in {layer.in_features for layer in layers}}

    @torch.no_grad()
    def work() -> float:
        return timed(lambda: [layer(inputs[layer.in_features]) for layer in layers], like.device.type)

    return work


def bayesian(settings: Settings, num_members: int, where: str) -> Any:
    """A Bayesian model of M members."""
    model = attach(settings.subject.trainable(where))
    model.theta.data = members(model.theta.detach()[0], num_members)
    return model.eval()


def greedy(model: Any, prompt: Tensor, *, num_new: int = NEW, **kwargs: Any) -> Work:
    """The steps after the prompt, by the model's own forward and cache."""

    @torch.no_grad()
    def work() -> float:
        output = model(prompt, use_cache=True, logits_to_keep=1, **kwargs)
        synchronize(prompt.device.type)
        start = time.perf_counter()
        for _ in range(num_new):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True, **kwargs)
        synchronize(prompt.device.type)
        return time.perf_counter() - start

    return work


@torch.no_grad()
def cache_bytes(model: Any, prompt: Tensor) -> int:
    """Return the bytes of keys and values after the prompt."""
    layers = model(prompt, use_cache=True, logits_to_keep=1).past_key_values.layers
    return sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in (layer.keys, layer.values))


def with_adapters(settings: Settings, where: str) -> Any:
    """A peft model with an adapter for every member, none of them zero."""
    model = settings.subject.trainable(where, num_adapters=settings.num_members)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def loop_of_adapters(model: Any, prompt: Tensor, count: int, *, num_new: int = NEW) -> Work:
    """A loop over members in every step, as their mixture decides on the token; each with a cache of its own."""

    def step(caches: list[Any], ids: Tensor) -> Tensor:
        mixture: Any = 0
        for member in range(count):
            model.set_adapter(adapter_name(member))
            output = model(ids, past_key_values=caches[member], use_cache=True, logits_to_keep=1)
            caches[member] = output.past_key_values
            mixture = mixture + output.logits[:, -1:].softmax(-1)
        return mixture.argmax(-1)

    @torch.no_grad()
    def work() -> float:
        caches: list[Any] = [None] * count
        token = step(caches, prompt)
        synchronize(prompt.device.type)
        start = time.perf_counter()
        for _ in range(num_new):
            token = step(caches, token)
        synchronize(prompt.device.type)
        return time.perf_counter() - start

    return work


def _peft(settings: Settings, prompt: Tensor, where: str) -> dict[str, Work]:
    model, count = with_adapters(settings, where), settings.num_members
    names = [adapter_name(member) for member in range(count)]
    rows = greedy(model, prompt.repeat(count, 1), adapter_names=names)
    return {"set_adapter": loop_of_adapters(model, prompt, count), "adapter_names": rows}
