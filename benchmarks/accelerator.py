"""A large model on a GPU: decoding, prefill, a training step, and memory, beside one plain model and a loop of peft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.decode import PROMPT, bayesian, greedy, loop_of_adapters, with_adapters
from benchmarks.harness import Line, Settings, compare, interleave, peak_memory
from benchmarks.models import WHERE, tokens
from benchmarks.prefill import LENGTH, ROWS, forward, loop
from benchmarks.training import chain_step, make_trainer, plain_step

FEW = 4
"""Members of the last block in full: each has a copy of all its weights, and in training a momentum and a gradient."""

NUM_NEW = 16
"""Tokens to decode: a loop over ten adapters takes half a second for one."""


def measure(settings: Settings) -> Iterator[Line]:
    """The lines of this group."""
    for where, count in ((WHERE[0], settings.num_members), (WHERE[2], min(FEW, settings.num_members))):
        some = replace(settings, num_members=count)
        for part in (_predictions, _training):
            yield from part(some, where)
            _release_memory(settings.device)


def _predictions(settings: Settings, where: str) -> list[Line]:
    """Decoding, whose text all members agreed on, its memory, and prefill; a loop exists for adapters only."""
    subject, count = settings.subject, settings.num_members
    makers: dict[str, Callable[[], Any]] = {"single": subject.plain, "ours": lambda: bayesian(settings, count, where)}
    if where == WHERE[0]:
        makers["set_adapter"] = lambda: with_adapters(settings, where)
    decoding, prefill, peaks = {}, {}, {}

    def first(kind: str) -> None:
        model = makers[kind]()
        prompt, ids = tokens(model, 1, PROMPT), tokens(model, ROWS, LENGTH)
        if kind == "set_adapter":
            decoding[kind] = loop_of_adapters(model, prompt, count, num_new=NUM_NEW)
            prefill[kind] = loop(model, ids, count)
        else:
            decoding[kind], prefill[kind] = greedy(model, prompt, num_new=NUM_NEW), forward(model, ids)
        decoding[kind]()

    for kind in makers:
        peaks[kind] = peak_memory(settings.device, lambda kind=kind: first(kind)) / 1e9
    seconds = interleave(decoding, settings.rounds)
    speed = {kind: NUM_NEW / min(values) for kind, values in seconds.items()}
    others, named = ("set_adapter",), f"{where}, M={count}"
    return [
        compare("accelerator", f"decode, {NUM_NEW} new tokens, B=1, {named}", seconds, others=others),
        Line("accelerator", f"decode, B=1, {named}", "tokens/s", speed.pop("ours"), others=speed),
        Line("accelerator", f"peak memory of decode, {named}", "GB", peaks.pop("ours"), others=peaks),
        compare(
            "accelerator", f"prefill {ROWS} x {LENGTH}, {named}", interleave(prefill, settings.rounds), others=others
        ),
    ]


def _training(settings: Settings, where: str) -> list[Line]:
    """A step of all chains, and the memory of a run of two steps: weights, caches and all, at the peak."""
    line = replace(chain_step(settings, where), group="accelerator")
    _release_memory(settings.device)
    peaks = {}
    for kind, work in (
        ("ours", lambda: make_trainer(settings, where, steps=2).train()),
        ("single", lambda: plain_step(settings.subject, where)()),
    ):
        peaks[kind] = peak_memory(settings.device, work) / 1e9
        _release_memory(settings.device)
    work = f"peak memory of training, {where}, M={settings.num_members}"
    return [line, Line("accelerator", work, "GB", peaks.pop("ours"), others=peaks)]


def _release_memory(device: str) -> None:
    """Free models that only cycles hold, and what torch keeps of a GPU's memory."""
    gc.collect()
    if device != "cpu":
        torch.accelerator.empty_cache()
