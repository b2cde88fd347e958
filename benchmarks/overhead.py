"""The cost of a step of ``BayesianTrainer`` beyond its gradient: update, guards, logging, collecting, data, the
probe of its diagnostics and the noise of its gradient.

On the last layer, where a step is shortest; every step is logged and every fourth one collected.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.harness import Line, Settings, compare, synchronize, timed
from benchmarks.models import WHERE
from benchmarks.training import make_trainer
from hf_bayes import BayesianTrainer
from hf_bayes.chains.run import NOISE_PERIOD
from hf_bayes.objectives.gradient_variance import between_parts


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    clock = ExtraClock(settings.device)
    trainer = make_trainer(settings, WHERE[1], steps=3 * settings.rounds + 2, callbacks=[clock])
    trainer.train()
    seconds = {"ours": clock.extra[1:], "single": clock.gradient[1 : len(clock.extra)]}
    work = f"what a training step does beside its gradient, LoRA on the last layer, M={settings.num_members}"
    return [
        compare("overhead", work, seconds, unit="% of a step", limit=3.0, times=100),
        _probe(settings, trainer, clock.gradient[1:]),
        _noise(settings, trainer, clock.gradient[1:]),
    ]


def _probe(settings: Settings, trainer: BayesianTrainer, gradients: list[float]) -> Line:
    """A look at the probe every 100 steps, spread over them."""
    theta = trainer.run.state.theta
    looks = [timed(lambda: trainer.monitor.probe(theta), settings.device) for _ in range(len(gradients) + 1)]
    interval = trainer.args.probe_steps
    work = f"the probe of the diagnostics every {interval} steps, LoRA on the last layer, M={settings.num_members}"
    seconds = {"ours": looks[1:], "single": gradients}
    return compare("overhead", work, seconds, unit="% of a step", limit=2.0, times=100 / interval)


def _noise(settings: Settings, trainer: BayesianTrainer, gradients: list[float]) -> Line:
    """The gradient of a quarter of a micro-batch's rows, spread over the steps from one to the next."""
    trainer.bayesian.train()
    passes, theta = trainer.active.objective.passes, trainer.run.theta
    batch = passes.prepare(next(iter(trainer.get_train_dataloader())))
    grad, whole = torch.zeros_like(theta), {"gradient": True, "step": 0, "chunks": passes.member_chunks(batch)}
    for some in passes.of_batch(theta, batch, micro=0, **whole):
        grad[some.members] += some.grad

    def part(rows: dict[str, Any], number: int) -> Any:
        return passes.of_batch(theta, rows, micro=number, **whole)

    noise = partial(between_parts, passes.model, batch, grad, part, num_groups=passes.num_groups)
    seconds = [timed(noise, settings.device) for _ in gradients]
    work = f"the noise of the gradient every {NOISE_PERIOD} steps, LoRA on the last layer, M={settings.num_members}"
    times = {"ours": seconds, "single": gradients}
    return compare("overhead", work, times, unit="% of a step", limit=1.0, times=100 / NOISE_PERIOD)


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
