"""The cost of an update of every rule beside SGHMC's, whose work is one normal draw and some ten passes over theta.

Eight chains of two million parameters (a LoRA of rank 8 on a model of 1B); the gradient is there already. A rule that
does more in some updates than in others (``swag`` collects about a hundred iterates of a run) is timed over a period.
Of an update that takes two gradients (``mean_field``), half the time counts: the model's own work is twice as much.
SGHMC is timed with what it can do besides, too: a layerwise mass, noise taken off for the gradient's, a ramp.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Line, Settings, Work, compare, interleave, synchronize
from benchmarks.models import RANK
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import chain_generators
from hf_bayes.core.schedules import Cyclical
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.ivon import IVONConfig

CHAINS, DIM, TENSORS = 8, 2_000_000, 4
SMALL = {"tiny": 20_000}
"""DIM beside models that only show that all runs."""

LIMIT = 1.5
ROUNDS = 5
"""The largest number of rounds: updates of one size vary little."""

LEFT_OUT = {"sghmc", "full_rank_vi"}
"""Methods without a line: the one that others are compared with, and one for a few thousand parameters at most."""

PERIODS = {"swag": 10, "ivon": IVONConfig().pair_period}
"""Updates that are timed at once, where not one."""


def measure(settings: Settings) -> list[Line]:
    """One line: the worst rule, with the ratios of all the others beside it."""
    dim = SMALL.get(settings.subject.shape, DIM)
    configs = {**{name: kind() for name, kind in METHODS.items() if name not in LEFT_OUT}, **VARIANTS}
    lines = {}
    for name, config in configs.items():
        rule, reference = assemble(config, _problem(dim)), assemble(SGHMCConfig(), _problem(dim))
        if isinstance(rule, Rule) and isinstance(reference, Rule):
            told, period = config.requirements.gradient_variance == "needed", PERIODS.get(name, 1)
            works = {
                "ours": _update(rule, settings.device, dim, period, told=told),
                "single": _update(reference, settings.device, dim),
            }
            seconds = interleave(works, min(settings.rounds, ROUNDS))
            work = f"an update of the worst rule, {name}, of [{CHAINS}, {dim / 1e6:g}M]"
            lines[name] = compare("updates", work, seconds, unit="x sghmc", limit=LIMIT)
    ordered = sorted(lines, key=lambda name: -lines[name].value)
    return [replace(lines[ordered[0]], others={name: lines[name].value for name in ordered[1:]})]


VARIANTS: dict[str, MethodConfig] = {
    "sghmc layerwise": SGHMCConfig(
        preconditioner="layerwise", preconditioner_batches=1, preconditioner_period=1_000_000
    ),
    "sghmc corrected": SGHMCConfig(correct_gradient_noise=True),
    "sghmc ramped": SGHMCConfig(schedule=Cyclical(ramp_up=0.5)),  # its rule is built anew for every temperature
}


def _problem(dim: int) -> Problem:
    """A run whose rules are past burn-in from the second update on, and collect every tenth iterate."""
    prior = GaussianPrior(torch.tensor(0.0), torch.tensor(1.0))
    width = dim // TENSORS // RANK  # half of the tensors LoRA's A, whose inputs MC dropout drops
    kinds = (("lora_A", (RANK, width)), ("lora_B", (width, RANK)))
    shapes = {f"{index}.{kinds[index % 2][0]}.weight": kinds[index % 2][1] for index in range(TENSORS)}
    return Problem(1000, prior, 0.01, 1002, 2, shapes, draw_steps=range(502, 1003, 500), update_fraction=1 / 1002)


def _update(rule: Rule, device: str, dim: int, period: int = 1, *, told: bool = False) -> Work:
    """Return the work of an update with given gradients, for each of them; the mean of ``period`` updates.

    Args:
        told: the variance of the gradient comes with it, small enough to leave noise to inject.
    """
    rngs = chain_generators(0, CHAINS, device=device)
    theta = 0.1 * torch.randn(CHAINS, dim, device=device, generator=rngs[0])
    variance = torch.ones(CHAINS, TENSORS, device=device) if told else None
    evaluation = Evaluation(torch.zeros(CHAINS, device=device), theta.clone(), variance)
    beside = -theta[:, None]
    state: Any = rule.init(theta, rngs)

    def work() -> float:
        nonlocal state
        begin, gradients = _now(device), 0
        with torch.no_grad():
            for _ in range(period):
                _, state = rule.locate(state, rngs)
                points = rule.anchor(state)
                given = evaluation if points is None else evaluation._replace(anchor_grad=beside.expand_as(points))
                state, _ = rule.update(state, given, 0.01, rngs)
                gradients += 1 if points is None else 1 + points.shape[1]
        return (_now(device) - begin) / gradients

    return work


def _now(device: str) -> float:
    synchronize(device)
    return time.perf_counter()
