"""The reviews of a ladder's choice: a temperature falls where a lower one is better by more than chance."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_bayes import SGHMCConfig
from hf_bayes.core.types import RowScores
from hf_bayes.methods import ladder
from tests.methods.ladder_runs import WARM, Watch, config, trainer

NUM_ROWS = 100
"""Held-out rows of a review: half of 200."""


def scores(mean: float, std: float = 0.0) -> RowScores:
    """Return the scores of rows with this mean; half of them are a standard deviation above it, and half below."""
    signs = np.resize([1.0, -1.0], NUM_ROWS)
    return RowScores(mean + std * signs, np.ones(NUM_ROWS, dtype=np.int64))


def plant(monkeypatch: pytest.MonkeyPatch, choice: Any, review: Any) -> None:
    """Plant the scores of a choice, a function of the draws, and of a review, of the draws and the options."""
    monkeypatch.setattr(
        "hf_bayes.objectives.model_objective.ModelObjective.heldout",
        lambda self, theta, part, num_members: (choice(theta.clone()), None),
    )

    def by_row(self: Any, theta: Tensor, part: str, *, num_groups: int, num_members: int | None) -> list[RowScores]:
        assert part == "even"
        each_chain = num_groups > 1  # the search for lost chains: all are alike
        return [scores(1.0)] * num_groups if each_chain else [review(theta.clone(), num_members)]

    monkeypatch.setattr("hf_bayes.objectives.heldout.HeldOutRows.by_row", by_row)


def test_draws_within_a_relaxation_count_in_part() -> None:
    parts = ladder._Ladder(SGHMCConfig(), (), (50,), True, (100, 150, 200), ())
    # (1 - 0.9) / h^2 is 2.5 updates and 1,000 of them; the draws span 100
    assert parts._independent_draws(SimpleNamespace(step_size=torch.tensor([0.2, 0.01]))) == round(3 + 1.1)


@pytest.mark.statistics
@pytest.mark.parametrize("falls_after", [1, 3, 4, None])
def test_a_temperature_falls_when_a_lower_one_becomes_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, falls_after: int | None
) -> None:
    """Check four reviews, the last of them after the last draw. The scores are planted; the third rung never wins."""
    seen, watch = list[Tensor](), Watch()
    temperatures = [1.0, 0.25, 0.04, 1e-4]
    choice: list[Tensor] = []

    def planted_choice(theta: Tensor) -> float:
        choice.append(theta)
        return float(len(choice))

    def planted_review(theta: Tensor, num_members: int | None) -> RowScores:
        assert (num_members is None) == (len(run.run.draws) == 4)  # at the end nothing is extrapolated
        seen.append(theta)
        reviews = math.inf if falls_after is None else 2 * falls_after - 2
        return scores({0: 1.0, 1: 0.5}.get(len(seen) - 1 - reviews, 2.0 + len(seen)))

    plant(monkeypatch, planted_choice, planted_review)
    settings = config(ladder={"temperature": temperatures}, draws_per_chain=4, **WARM)
    run = trainer(tmp_path, settings, watch, learning_rate=None, max_steps=60)
    run.train()
    assert run.method.temperature == (1.0 if falls_after is None else 0.25)
    origin, raw = run.run.state.origin, torch.stack(run.run.draws, 1)
    kept = run.posterior.approximation.theta.unflatten(0, (4, -1))
    if falls_after is None:
        assert torch.equal(kept, raw)
        return
    now, lower, lowest = seen[2 * falls_after - 2 :][:3]
    # what would be kept: after the last draw all draws, and before it what follows from here
    assert torch.equal(now, raw.flatten(0, 1) if falls_after == 4 else raw[:, falls_after - 1])
    home = choice[0]  # at T = 1
    assert falls_after == 4 or not torch.allclose(home, now)
    torch.testing.assert_close(lower - origin, 0.5 * (home - origin))
    torch.testing.assert_close(lowest - origin, 0.2 * (home - origin))
    assert torch.equal(kept, lower[:, None] if falls_after == 4 else raw[:, falls_after:])
    if falls_after < 4:
        after = watch.theta[run.run.problem.draw_steps[falls_after - 1]]  # one update later
        assert (after - lower).abs().max() < (after - now).abs().max()


@pytest.mark.statistics
@pytest.mark.parametrize(("std", "falls"), [(0.8, True), (1.2, False)])
def test_chance_alone_makes_no_temperature_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, std: float, falls: bool
) -> None:
    """Check a difference of 0.1 nats: its standard error, std / sqrt(99), is 0.08 or 0.12."""
    count = [0]

    def planted_review(theta: Tensor, num_members: int | None) -> RowScores:
        count[0] += 1
        return scores(-0.1, std) if count[0] == 2 else scores(0.0)

    plant(monkeypatch, lambda theta: 0.0, planted_review)
    run = trainer(tmp_path, config(ladder={"temperature": [1.0, 0.25]}, **WARM), learning_rate=None)
    run.train()
    assert run.method.temperature == (0.25 if falls else 1.0)


def test_rows_that_are_not_finite_make_a_temperature_fall() -> None:
    assert ladder._is_better(scores(1.0), scores(math.inf))
    assert not ladder._is_better(scores(math.inf), scores(1.0))
    assert not ladder._is_better(scores(1.0), scores(1.0))


@pytest.mark.parametrize(("count", "expected"), [(1, ()), (2, (10,)), (4, (10, 20, 30)), (9, (30, 50, 70))])
def test_a_choice_is_reviewed_after_each_quarter(count: int, expected: tuple[int, ...]) -> None:
    draws = tuple(range(10, 10 * count + 1, 10))
    assert ladder._reviews(draws, 5) == expected
    assert ladder._reviews(draws, 25) == tuple(step for step in expected if step > 25)


@pytest.mark.statistics
@pytest.mark.parametrize(("at_choice", "warns"), [(0.5, True), (100.0, False)])
def test_draws_that_left_a_good_place_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_choice: float, warns: bool
) -> None:
    """The score at the choice is planted; that of the draws, log 3 about, is their own."""
    plant(monkeypatch, lambda theta: at_choice, lambda theta, num_members: scores(at_choice))
    run = trainer(tmp_path, config(ladder={"temperature": [1.0, 0.25]}, **WARM), learning_rate=None)
    run.train()
    nll = run.posterior.config.calibration["nll"]
    assert (f"{nll:.4g} nats under the draws, and had 0.5 under the chains when T" in caplog.text) == warns
