"""A large model on a GPU: tokens per second, a training step, and memory, beside one plain model and a loop of peft."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from benchmarks.decode import NEW, PROMPT, bayesian, greedy, loop_of_adapters, with_adapters
from benchmarks.harness import Line, Settings, Work, in_child, interleave, peak_memory
from benchmarks.models import WHERE, Subject, tokens
from benchmarks.training import chain_step, make_trainer, plain_step

SUBSPACES = (WHERE[0], WHERE[2])


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    lines = []
    for where in SUBSPACES:
        lines += [_tokens_per_second(settings, where), chain_step(settings, where)]
        lines += [_memory(settings, where, "decode"), _memory(settings, where, "training")]
    return lines


def _tokens_per_second(settings: Settings, where: str) -> Line:
    """Text that all members agreed on, per second; a loop exists for adapters only."""
    plain = settings.subject.plain()
    prompt = tokens(plain, 1, PROMPT)
    works: dict[str, Work] = {"single": greedy(plain, prompt)}
    works["ours"] = greedy(bayesian(settings, settings.num_members, where), prompt)
    if where == WHERE[0]:
        works["set_adapter"] = loop_of_adapters(with_adapters(settings, where), prompt, settings.num_members)
    seconds = interleave(works, settings.rounds)
    speed = {name: NEW / min(values) for name, values in seconds.items()}
    work = f"decode, B=1, {where}, M={settings.num_members}"
    return Line("accelerator", work, "tokens/s", speed.pop("ours"), others=speed, seconds=seconds)


def _memory(settings: Settings, where: str, task: str) -> Line:
    """Weights, caches and all, at the peak."""
    kinds = ["ours", "single", *(["set_adapter"] if where == WHERE[0] and task == "decode" else [])]
    peaks = {
        kind: in_child(
            "benchmarks.accelerator:peak", astuple(settings.subject), settings.num_members, where, task, kind
        )
        for kind in kinds
    }
    work = f"peak memory of {task}, {where}, M={settings.num_members}"
    return Line("accelerator", work, "GB", peaks.pop("ours"), others=peaks)


def peak(fields: list[str], num_members: int, where: str, task: str, kind: str) -> float:
    """GB, from before the model was there."""
    settings = Settings(Subject(*fields), num_members, rounds=1)
    return peak_memory(settings.device, lambda: _work(settings, where, task, kind)) / 1e9


def _work(settings: Settings, where: str, task: str, kind: str) -> Any:
    subject = settings.subject
    if task == "training":
        return make_trainer(settings, where, steps=2).train() if kind == "ours" else plain_step(subject, where)()
    if kind == "set_adapter":
        model = with_adapters(settings, where)
        return loop_of_adapters(model, tokens(model, 1, PROMPT), settings.num_members)()
    model = bayesian(settings, settings.num_members, where) if kind == "ours" else subject.plain()
    return greedy(model, tokens(model, 1, PROMPT))()
