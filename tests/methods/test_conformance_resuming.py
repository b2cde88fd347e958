"""Every method keeps its inputs unchanged, and a run restored from its state continues bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Kernel, Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.assembly import assemble
from tests.methods.by_hand import evaluated
from tests.methods.conformance import N, Row, noisy, rough, rows, starts


class Drive:
    """A method that the test advances by hand, like a trainer."""

    def __init__(self, config: MethodConfig, row: Row, num_chains: int) -> None:
        problem = Problem(N, FlatPrior(), row.learning_rate, num_steps=12, burn_in=6, shapes={"": (5,)})
        self.method = assemble(config, problem)
        self.row = row
        self.rngs = [generator(3, "chain", chain) for chain in range(num_chains)]
        self.state: Any = None

    @staticmethod
    def evaluate(theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        leaf = theta.detach().requires_grad_()
        value = rough(leaf, None)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        columns = -value.detach()[:, None].expand(-1, 4)[:, batches or slice(None)]
        return Evaluation(-value.detach(), -grad if gradient else None, batch_log_lik=columns)

    def begin(self, theta: Tensor) -> Drive:
        args = (theta, self.evaluate, self.rngs) if isinstance(self.method, Kernel) else (theta, self.rngs)
        self.state = self.method.init(*args)  # type: ignore[call-arg]
        return self

    def advance(self) -> None:
        if isinstance(self.method, Kernel):
            self.state, _ = self.method.step(self.state, self.evaluate, self.rngs)
            return
        theta, self.state = self.method.locate(self.state, self.rngs)
        evaluation = evaluated(self.method, self.state, theta, self.evaluate)
        self.state, _ = self.method.update(self.state, evaluation, self.row.learning_rate, self.rngs)

    def saved(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        tensors = {name: tensor.clone() for name, tensor in self.state._asdict().items()}
        return tensors, [rng.get_state().clone() for rng in self.rngs]

    def restore(self, tensors: dict[str, Tensor], rng_states: list[Tensor]) -> Drive:
        self.begin(torch.zeros(len(self.rngs), 5))  # for the state's type only
        self.state = type(self.state)(**tensors)
        for rng, rng_state in zip(self.rngs, rng_states, strict=True):
            rng.set_state(rng_state)
        return self


@rows
@pytest.mark.parametrize("warm_start_steps", [0, 4])
def test_a_run_restored_at_any_update_continues_bitwise(row: Row, warm_start_steps: int) -> None:
    config = dataclasses.replace(row.config, warm_start_steps=warm_start_steps)
    whole = Drive(config, row, 3).begin(starts(3, 5))
    cuts = []
    for _ in range(12):
        cuts.append(whole.saved())
        whole.advance()
    for cut, (tensors, rng_states) in enumerate(cuts):
        resumed = Drive(config, row, 3).restore(tensors, rng_states)
        for _ in range(12 - cut):
            resumed.advance()
        for name, tensor in whole.state._asdict().items():
            assert torch.equal(getattr(resumed.state, name), tensor), (cut, name)


@noisy
def test_the_resume_check_catches_lost_generators(row: Row) -> None:
    whole = Drive(row.config, row, 3).begin(starts(3, 5))
    whole.advance()
    tensors, rng_states = whole.saved()
    fresh = [generator("lost", chain).get_state() for chain in range(3)]
    ends = []
    for states in (rng_states, fresh):
        resumed = Drive(row.config, row, 3).restore(tensors, states)
        for _ in range(11):
            resumed.advance()
        ends.append(resumed.state.theta)
    assert not torch.equal(*ends)


@rows
@pytest.mark.parametrize("warm_start_steps", [0, 4])
def test_updates_change_neither_the_start_nor_earlier_states(row: Row, warm_start_steps: int) -> None:
    theta = starts(3, 5)
    drive = Drive(dataclasses.replace(row.config, warm_start_steps=warm_start_steps), row, 3).begin(theta)
    for _ in range(12):
        state, (before, _) = drive.state, drive.saved()
        drive.advance()
        for name, tensor in before.items():
            assert torch.equal(getattr(state, name), tensor), name
    assert torch.equal(theta, starts(3, 5))
