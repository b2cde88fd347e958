"""A run of a method on a target with a gold: its distance to the exact posterior, and its cost in passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import set_seed

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Approximation, Rule
from hf_bayes.diagnostics.convergence import rhat
from hf_bayes.methods.assembly import rate_factor
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.batches import ChainBatches
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.starting import StartedRun, start_run
from hf_bayes.uncertainty.decomposition import decompose
from scripts.reproduce.gold_chains import Gold, variation

NUM_MEMBERS = 1000
"""Members of a Gaussian approximation in its predictions."""


class AnyTarget(Protocol):
    """The data of a target, and its model."""

    @property
    def num_rows(self) -> int: ...
    def digest(self) -> str: ...
    def attached(self, num_members: int) -> BayesianModel: ...
    def batch(self, numbers: Tensor) -> dict[str, Tensor]: ...
    def member_logits(self, members: Tensor) -> Tensor: ...


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        method: (draws of a chain) -> the config, without any setting but the number of members.
        passes: budget in passes of one chain over the data.
        draw_every: epochs between two draws of a chain; None takes one draw.
        gradients: expected gradients of an update: more than 1 where updates take a control variate.
        batch: rows of an update.
        beside: passes of a chain beside its updates, which then are within the budget: of the curvature, and of all
            rows for a control variate.
    """

    method: Callable[[int], MethodConfig]
    passes: float
    draw_every: float | None = None
    gradients: float = 1.0
    batch: int = 64
    beside: float = 0.0


class Counted:
    """An objective that counts its passes over the data and its updates with two gradients."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.num_passes, self.num_anchors = objective, 0, 0
        self.words, self.place_of = objective.words, objective.place_of

    def for_update(self, batches: list[Any], **options: Any) -> Any:
        evaluate = self.objective.for_update(batches, **options)

        def counted(theta: Tensor, *, anchor: Tensor | None = None, **how: Any) -> Any:
            self.num_anchors += anchor is not None
            return evaluate(theta, anchor=anchor, **how)

        counted.info = evaluate.info  # type: ignore[attr-defined]
        return counted

    def curvature(self, theta: Tensor, spec: Any, *, gradient: bool = True) -> Any:
        """Pass over the data for one chain, with theta [d]."""
        self.num_passes += 1
        return self.objective.curvature(theta, spec, gradient=gradient)

    def full_gradient(self, theta: Tensor, *, share: float = 1.0) -> Tensor | None:
        """Pass over the data for each chain of theta [M, d]."""
        self.num_passes += len(theta)
        found: Tensor | None = self.objective.full_gradient(theta, share=share)
        return found


def begin(rows: AnyTarget, row: Row, seed: int = 0, theta: Tensor | None = None) -> tuple[StartedRun, Iterator[Any]]:
    """Return a run before its first update, and the batches of its updates.

    Args:
        theta: [M, d] where the chains start; None leaves it to the library.
    """
    set_seed(seed)
    n, chains, batch = rows.num_rows, row.method(1).num_chains, row.batch
    num_steps = int((row.passes / chains - row.beside) / row.gradients * n / batch)
    draws = 1 if row.draw_every is None else min(num_steps // 4, int(num_steps / 2 * batch / n / row.draw_every))
    method = row.method(max(1, draws))

    def take(numbers: Sequence[int]) -> dict[str, Tensor]:
        return rows.batch(torch.as_tensor(numbers))

    def updates(chains: range | None) -> Iterator[Any]:
        many = {"accumulation": 1, "updates_per_epoch": num_steps}
        return ([take(some)] for some in ChainBatches(n, batch_size=batch, chains=chains, seed=seed, **many))

    started = start_run(
        rows.attached(chains), method, DataScale(float(n), n, n, batch), num_steps=num_steps, learning_rate=None,
        seed=seed, theta=theta, most_terms=1, batch_fraction=batch / n, shared=False, members_per_pass=chains,
        data=DataAccess(lambda numbers: (take(part) for part in _parts(numbers)), n),
        trial_updates=lambda: updates(None),
    )  # fmt: skip
    return started, updates(range(chains))


def _parts(numbers: Sequence[int], size: int = 256) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def measured(rows: AnyTarget, gold: Gold, row: Row, seed: int = 0) -> dict[str, Any]:
    """Run a method, and return its distance to the gold and its cost."""
    clock = time.process_time()
    (run, _, _, settings), updates = begin(rows, row, seed)
    run.objective = objective = Counted(run.objective)
    rule, chains, share = run.method, len(run.chains), row.batch / rows.num_rows
    assert isinstance(rule, Rule)
    gradients, trial, account = 0, settings.trial, {}
    for step in range(run.problem.num_steps):
        factor = rate_factor(settings.method, step, run.problem.draw_steps)
        rate = factor * (1.0 if settings.learning_rate is None else settings.learning_rate)
        before = objective.num_anchors
        info = run.update(next(updates), rate).info
        gradients += 1 + objective.num_anchors - before
        kept = {name: of for name, of in info.items() if name.startswith("trial_") or name == "relaxation"}
        account |= {name: round(float(of.mean()), 3) for name, of in kept.items()}
    draws, passes = run.stacked_draws(), chains * share * gradients
    found = run.finish().approximation
    passes += objective.num_passes
    if trial is not None:
        passes += share * len(trial.losses) * trial.num_updates
    members = members_of(found)
    seconds = round(time.process_time() - clock, 1)
    scores = distance(rows.member_logits(members).double(), gold)
    if found.kind == "draws" and draws.shape[1] >= 4 and chains > 1:
        logits = rows.member_logits(draws.flatten(0, 1)).unflatten(0, draws.shape[:2])
        scores["rhat"] = round(float(rhat((logits - logits.mean(-1, keepdim=True)).flatten(2)).max()), 4)
    return {**scores, "members": len(members), "chains": chains, "passes": round(passes), "seconds": seconds, **account}


def members_of(found: Approximation) -> Tensor:
    """Return draws [K, d]: all that are stored, or ``NUM_MEMBERS`` of a Gaussian."""
    return found.sample(found.num_stored if found.kind == "draws" else NUM_MEMBERS, generator("members"))


def distance(logits: Tensor, gold: Gold) -> dict[str, float]:
    """Return the total variation between the mixture of members' logits [K, B, C] and the gold's, and the ratio of EU.

    Both are means over rows.
    """
    found = variation(logits.softmax(-1).mean(0), gold.probs.double())
    return {"tv": round(found, 5), "eu": round(float(decompose(logits).epistemic.mean() / gold.epistemic.mean()), 4)}


def least_variation(gold: Gold, num_members: float = math.inf) -> float:
    """Return the total variation to expect between so many independent draws of the posterior and this gold."""
    one_draw, size = float(gold.about["tv_draw"]), float(gold.about["ess_median"])
    return one_draw * (1 / num_members + 1 / size) ** 0.5
