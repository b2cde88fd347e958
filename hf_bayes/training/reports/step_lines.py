"""The lines that a run prints: few numbers per step, for any number of chains.

``Trainer.log`` hands every number to all callbacks. Those of ``report_to`` (TensorBoard, Weights & Biases and others)
and ``trainer.state.log_history`` keep each chain's own; the callbacks that print get what ``short_line`` leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

MAX_NUMBERS = 12
MEANS = ("step_size", "acceptance", "kinetic_temperature", "configurational_temperature", "distance_moved")
"""Diagnostics of chains whose mean over the chains is printed, in this order, as far as there is room."""
_OF_A_CHAIN = re.compile(r"(.+)/chain_\d+")
_SPEED = re.compile(r".*(_runtime|_per_second|_model_preparation_time)")


def short_line(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the printed numbers of a step or an evaluation: means over chains instead of the numbers of each chain.

    What other code logs stays, so that a line exceeds ``MAX_NUMBERS`` only if that code alone does. In an evaluation
    with more numbers than that, timings go first.
    """
    chains: dict[str, list[float]] = {}
    line: dict[str, Any] = {}
    for name, value in logs.items():
        of_a_chain = _OF_A_CHAIN.fullmatch(name)
        if of_a_chain:
            chains.setdefault(of_a_chain[1], []).append(value)
        else:
            line[name] = value
    if len(line) > MAX_NUMBERS:
        line = {name: value for name, value in line.items() if not _SPEED.fullmatch(name)}
    epoch = {"epoch": line.pop("epoch")} if "epoch" in line else {}
    for name in [name for name in MEANS if name in chains][: max(0, MAX_NUMBERS - len(line) - len(epoch))]:
        line[name] = sum(chains[name]) / len(chains[name])
    return line | epoch


def shorten_lines(handler: CallbackHandler) -> None:
    """Let transformers' own printing callbacks of ``handler`` print short lines."""
    for index, callback in enumerate(handler.callbacks):
        if type(callback) is PrinterCallback:
            handler.callbacks[index] = ShortPrinterCallback()
        elif type(callback) is ProgressCallback:
            handler.callbacks[index] = ShortProgressCallback(callback.max_str_len)


class ShortPrinterCallback(PrinterCallback):
    """transformers' ``PrinterCallback`` with short lines."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=short_line(logs or {}), **kwargs)  # type: ignore[no-untyped-call]


class ShortProgressCallback(ProgressCallback):
    """transformers' ``ProgressCallback`` with short lines."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=short_line(logs or {}), **kwargs)  # type: ignore[no-untyped-call]
