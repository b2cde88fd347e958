"""A step of every chain by ``BayesianTrainer`` (SGHMC, shared minibatch 4 x 128), against a plain LoRA AdamW step.

The trainer's clock runs from the start of one step to the start of the next: data, gradient, update, guards, logging.
In between, outside the clock, a callback lets the others do their step, so that all are interleaved.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from benchmarks import bounds
from benchmarks.harness import ROOT, Line, Settings, Work, compare, in_child, peak_memory, synchronize, timed
from benchmarks.models import WHERE, Subject, tokens
from hf_bayes import BayesianTrainer, BayesianTrainingArguments, IVONConfig, SGHMCConfig
from hf_bayes.core.config import MethodConfig

ROWS, LENGTH, STEPS_OF_AN_EPOCH = 4, 128, 4


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    return [
        chain_step(settings, WHERE[1], limit=0.56),
        chain_step(settings, WHERE[1], limit=0.46, cached=True),
        chain_step(settings, WHERE[0], limit=1.03),
        natural_gradient_step(settings, WHERE[0], limit=1.1),
        natural_gradient_step(settings, WHERE[1], limit=1.1),
        _memory(settings),
        _numbers(settings),
    ]


def chain_step(settings: Settings, where: str, *, limit: float | None = None, cached: bool = False) -> Line:
    """A step of the trainer, divided by its chains, in steps of AdamW; ``cached``: after an epoch with trunk memory."""
    count = settings.num_members
    others: dict[str, Work] = {"single": plain_step(settings.subject, where)}
    with Posteriors(settings, where) as posteriors:
        if posteriors.running and not cached:
            others["posteriors"] = posteriors.step
        seconds = train_interleaved(settings, where, others, cached=cached)
    if "posteriors" in seconds:  # which runs one chain, so that M of them take M times as long
        seconds["posteriors"] = [count * value for value in seconds["posteriors"]]
    remembered = ", cached trunk output" if cached else ""
    return compare(
        "training",
        f"chain-step of training, {_named(where)}{remembered}, M={count}",
        seconds,
        unit="x AdamW step",
        limit=limit,
        bound=bounds.training(settings.subject, where, count, cached=cached),
        times=1 / count,
        others=("posteriors",),
    )


def natural_gradient_step(settings: Settings, where: str, *, limit: float) -> Line:
    """A step of one chain of IVON by the trainer: the mean over a period, in which one step has a second gradient."""
    method = IVONConfig(num_chains=1)
    assert method.pair_period is not None
    steps = replace(settings, rounds=method.pair_period * settings.rounds)
    single: dict[str, Work] = {"single": plain_step(settings.subject, where)}
    each = train_interleaved(steps, where, single, method=method)
    with_pair = 2 * bounds.training(settings.subject, where, 2)
    seconds = {name: torch.tensor(found).view(settings.rounds, -1).sum(1).tolist() for name, found in each.items()}
    return compare(
        "training", f"step of IVON, {_named(where)}, M=1", seconds, unit="x AdamW step", limit=limit,
        bound=(method.pair_period - 1 + with_pair) / method.pair_period,
    )  # fmt: skip


def _memory(settings: Settings) -> Line:
    """Compare the memory of a step on all layers: M chains, without the memory that holds them, against one chain."""
    peaks = {
        count: in_child("benchmarks.training:step_memory", astuple(settings.subject), count)
        for count in (1, settings.num_members)
    }
    one, many = peaks[1], peaks[settings.num_members]
    value = (many["peak"] - many["stacked"]) / one["peak"]
    work = f"memory of training, LoRA on all layers, M={settings.num_members}, without the stacked parameters"
    return Line("training", work, "x one chain", value, limit=1.3)


def _numbers(settings: Settings) -> Line:
    """Return the memory of a chain with so many parameters that its passes hardly count."""
    count = 2 * settings.num_members
    value = in_child("benchmarks.training:numbers_per_parameter", astuple(settings.subject), count)
    return Line("training", f"memory of training, {WHERE[2]}, M={count}", "numbers per parameter", value, limit=10.5)


def numbers_per_parameter(subject: list[str], num_chains: int) -> float:
    """Return the largest number of floats that a run of two steps holds, for each random parameter of each chain."""
    trainer = make_trainer(Settings(Subject(*subject), num_chains, rounds=1), WHERE[2], steps=2)
    return peak_memory(trainer.bayesian.theta.device.type, trainer.train) / trainer.bayesian.theta.nbytes


def step_memory(subject: list[str], num_chains: int) -> dict[str, int]:
    """Bytes by which a run of two steps grew at most, and bytes of the chains' parameters, momenta and gradients."""
    settings = Settings(Subject(*subject), num_chains, rounds=1)
    trainer = make_trainer(settings, WHERE[0], steps=2)
    return {"peak": peak_memory(settings.device, trainer.train), "stacked": 3 * trainer.bayesian.theta.nbytes}


def train_interleaved(
    settings: Settings,
    where: str,
    others: Mapping[str, Work],
    *,
    cached: bool = False,
    method: MethodConfig | None = None,
) -> dict[str, list[float]]:
    """Seconds of the trainer's steps ("ours") and of ``others``, round by round, after a first one or a first epoch."""
    first = 1 + (STEPS_OF_AN_EPOCH if cached else 0)
    clock = StepClock(others, settings.device, first)
    steps = first + settings.rounds + 1
    memory = 4.0 if cached else 0.0
    make_trainer(settings, where, steps=steps, method=method, callbacks=[clock], trunk_memory_gib=memory).train()
    return {"ours": clock.seconds, **clock.others}


class StepClock(TrainerCallback):
    """Times a Trainer's steps from start to start, and in between the works of others, after ``first`` steps."""

    def __init__(self, works: Mapping[str, Work], device: str, first: int) -> None:
        self.works, self.device, self.first = works, device, first
        self.seconds: list[float] = []
        self.others: dict[str, list[float]] = {name: [] for name in works}
        self.start: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.start is not None:
            synchronize(self.device)
            elapsed, others = time.perf_counter() - self.start, {name: work() for name, work in self.works.items()}
            if state.global_step > self.first:
                self.seconds.append(elapsed)
                for name, value in others.items():
                    self.others[name].append(value)
        synchronize(self.device)
        self.start = time.perf_counter()


def make_trainer(
    settings: Settings,
    where: str,
    *,
    steps: int,
    method: MethodConfig | None = None,
    trunk_memory_gib: float = 0.0,
    **arguments: Any,
) -> BayesianTrainer:
    """SGHMC, or another method, on LoRA; every step is logged, and every fourth one of SGHMC gives a draw."""
    model = settings.subject.trainable(where)
    ids = tokens(model, ROWS * STEPS_OF_AN_EPOCH, LENGTH).cpu()
    directory = tempfile.mkdtemp(prefix="hf_bayes-benchmark-")
    draws = max(1, steps // 4)
    sghmc = SGHMCConfig(num_chains=settings.num_members, draws_per_chain=draws, burn_in=0, prior_std=0.05)
    trainer = BayesianTrainer(
        model=model,
        method=method or sghmc,
        args=BayesianTrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=ROWS, minibatch="shared",
            trunk_memory_gib=trunk_memory_gib, map_updates=0,
            learning_rate=1e-4 if method is None else None, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=settings.device == "cpu",
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}),
        **arguments,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def plain_step(subject: Subject, where: str) -> Work:
    """The loop that everyone writes: forward with labels, backward, AdamW."""
    model = subject.trainable(where).train()
    ids = tokens(model, ROWS, LENGTH)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda: timed(step, subject.device)


def _named(where: str) -> str:
    return f"LoRA on {where}" if where != WHERE[2] else where


class Posteriors:
    """SGHMC of the package ``posteriors`` on the same model and rows, in an environment of its own.

    Attributes:
        running: whether there is one.
    """

    def __init__(self, settings: Settings, where: str) -> None:
        self.running = settings.posteriors_python is not None
        setup = [astuple(settings.subject), where, ROWS, LENGTH, torch.get_num_threads()]
        self.command = [str(settings.posteriors_python), "-W", "ignore", "-m", "benchmarks.posteriors_step"]
        self.command.append(json.dumps(setup))

    def __enter__(self) -> Posteriors:
        if self.running:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen(self.command, cwd=ROOT, **pipes)
            self.step()
        return self

    def step(self) -> float:
        """Seconds of a step of one chain."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self.command)} ended early: see its message above")
        return float(answer)

    def __exit__(self, *error: object) -> None:
        if self.running:
            self.process.communicate()
