"""What a training step of ``BayesianTrainer`` costs beyond its gradient: update, guards, logging, collecting, data.

On the last layer, where a step is shortest; every step is logged and every fourth one collected.
"""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from benchmarks.harness import Line, Settings, compare, synchronize
from benchmarks.models import WHERE
from benchmarks.training import make_trainer


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    clock = ExtraClock(settings.device)
    make_trainer(settings, WHERE[1], steps=3 * settings.rounds + 2, callbacks=[clock]).train()
    seconds = {"ours": clock.extra[1:], "single": clock.gradient[1 : len(clock.extra)]}
    work = f"what a training step does beside its gradient, LoRA on the last layer, M={settings.num_members}"
    return [compare("overhead", work, seconds, unit="% of a step", limit=3.0, times=100)]


class ExtraClock(TrainerCallback):
    """Splits steps into the gradient (to the end of the last backward) and the rest, up to the next step's start."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gradient: list[float] = []
        self.extra: list[float] = []
        self.before: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._now()
        if self.before is not None:
            self.extra.append(now - self.before)
        self.before = now

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._now()
        assert self.before is not None
        self.gradient.append(now - self.before)
        self.before = now

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()
