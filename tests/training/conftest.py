"""Fixtures that several tests of the trainer share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.core.types import Evaluation, Rule, locate_at_theta
from hf_bayes.distributions.approximations import Draws
from hf_bayes.objectives import starting
from tests.training.checkpointed import run
from tests.training.trained import Still


@pytest.fixture
def evaluations(monkeypatch) -> list[Evaluation]:
    """Return the evaluations that the trainer gives to its rule, which never moves."""
    seen: list[Evaluation] = []

    def update(state: Still, evaluation: Evaluation, lr: float, rngs: Any) -> tuple[Still, dict]:
        seen.append(Evaluation(evaluation.log_lik.clone(), evaluation.grad_log_lik.clone()))
        return state, {}

    rule = Rule(
        init=lambda theta, rngs: Still(theta, torch.zeros(len(theta), dtype=torch.int64)),
        locate=locate_at_theta,
        update=update,
        finish=lambda state, draws: Draws.from_chains(draws),
    )
    monkeypatch.setattr(starting, "assemble", lambda config, problem: rule)
    return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints after updates 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    run(directory).train()
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))
