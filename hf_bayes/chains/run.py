"""A run of chains: the only owner of their states, draws and random generators.

``sample``, the trainer, the MAP reference and a loop of your own advance chains by the same ``Run.update``. Observers
read the ``StepRecord`` that it returns and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from hf_bayes.chains.objective import Objective, UpdateObjective
from hf_bayes.core.types import Approximation, Evaluation, Info, Kernel, Problem, Rngs, Rule, State

NOISE_PERIOD = 97
"""Updates between two estimates of the gradient's variance from halves of a batch. An estimate costs half a gradient,
0.5 % of all gradients. The period is prime, so that no cycle of a schedule or of a preconditioner has the same phase in
all estimates."""


class StepRecord(NamedTuple, Generic[State]):
    """The values of one update of all chains of a run; nothing in it is changed later.

    Attributes:
        step: updates done, this one included.
        learning_rate: the step size of the update; None for a kernel, which has its own.
        before: [M, d] where the chains were.
        state: the method's State after the update.
        info: the method's diagnostics, name -> [M].
        loss: [M] minus the mean log-likelihood of a term, in nats; None for an objective without terms.
    """

    step: int
    learning_rate: float | None
    before: Tensor
    state: State
    info: Info
    loss: Tensor | None

    @property
    def moved(self) -> bool:
        """True if a rule took a step. An update that only estimates something returns the same theta."""
        return bool(self.learning_rate) and self.state.theta is not self.before


class Run(Generic[State]):
    """Chains of one method on one objective, advanced update by update.

    Attributes:
        method: the rule or kernel.
        objective: the log-likelihood.
        problem: the problem that the method was built for; its ``draw_steps`` are the updates that end in a draw.
        rngs: one generator per chain.
        chains: global indices of the chains of this process.
        state: the method's State; None before the first update.
        num_updates: updates done.
        draws: [M, d] each, on ``draws_on``.
        loss: [M] of the last update, see ``StepRecord``.
    """

    def __init__(
        self,
        method: Rule[State] | Kernel[State],
        objective: Objective,
        theta: Tensor,
        rngs: Rngs,
        problem: Problem,
        *,
        warm_start: int = 0,
        chains: range | None = None,
        draws_on: torch.device | str = "cpu",
        watch_noise: bool = False,
    ) -> None:
        self.method, self.objective, self.problem = method, objective, problem
        self.rngs = list(rngs)
        self.chains = range(len(theta)) if chains is None else chains
        self.state: State | None = None
        self.num_updates = 0
        self.draws: list[Tensor] = []
        self.loss: Tensor | None = None
        self._start, self._warm_start, self._draws_on = theta, warm_start, draws_on
        self._watch_noise = watch_noise

    @property
    def theta(self) -> Tensor:
        """The positions of the chains [M, d]."""
        return self._start if self.state is None else self.state.theta

    @torch.no_grad()
    def update(self, batches: list[Any], learning_rate: float | None = None) -> StepRecord[State]:
        """Advance all chains by one update.

        Args:
            batches: the batches of the update, as the objective takes them.
            learning_rate: the step size of a rule.
        Raises:
            FloatingPointError: naming step, chain and parameter, before a number that is not finite enters the state.
        """
        if isinstance(self.method, Rule):
            before, self.state, info = self._follow_rule(self.method, batches, learning_rate)
        else:
            before, self.state, info = self._follow_kernel(self.method, batches)
            learning_rate = None
        self.num_updates += 1
        if self.num_updates in self.problem.draw_steps:
            self.take_draw()
        assert self.state is not None
        return StepRecord(self.num_updates, learning_rate, before, self.state, info, self.loss)

    def take_draw(self) -> None:
        """Store the positions of the chains as a draw."""
        self.draws.append(self.theta.detach().to(self._draws_on, copy=True))

    @torch.no_grad()
    def finish(self) -> Approximation:
        """Return the approximation that the method builds from its draws."""
        if self.state is None:
            raise ValueError("the run has no update yet, so it has no state to finish: call update first")
        return self.method.finish(self.state, torch.stack(self.draws, 1))

    # -- updates ---------------------------------------------------------------------------------------------------

    def _follow_rule(
        self, rule: Rule[State], batches: list[Any], learning_rate: float | None
    ) -> tuple[Tensor, State, Info]:
        if learning_rate is None or not 0 <= learning_rate < math.inf:
            raise ValueError(
                f"the learning rate of step {self.num_updates + 1} is {learning_rate}, it must be a finite number "
                ">= 0: check the schedule and callbacks"
            )
        state = rule.init(self._start.clone(), self.rngs) if self.state is None else self.state
        if self.num_updates in rule.early_passes:
            state = rule.early_passes[self.num_updates](state, self.objective.data_pass)
        theta, state = rule.locate(state, self.rngs)
        before = state.theta
        evaluate = self.objective.for_update(batches, step=self.num_updates)
        anchor = rule.anchor(state)
        evaluation = evaluate(theta, split_rows=self._splits_rows, anchor=anchor)
        assert evaluation.grad_log_lik is not None
        words = self.objective.words
        self._require_finite({words.gradient: evaluation.grad_log_lik, words.value: evaluation.log_lik})
        if evaluation.anchor_grad is not None:
            self._require_finite({f"{words.gradient} at the anchor": evaluation.anchor_grad})
        state, info = rule.update(state, evaluation, learning_rate, self.rngs)
        self._require_finite({f"{name} after the update": value for name, value in state._asdict().items()})
        self.loss = evaluation.loss
        return before, state, {**info, **evaluate.info()}

    def _follow_kernel(self, kernel: Kernel[State], batches: list[Any]) -> tuple[Tensor, State, Info]:
        state, inside, known = self.state, self.theta, self.loss
        if state is None:
            evaluate = _Watched(self.objective.for_update(batches, step=self.num_updates, inside=inside))
            state = kernel.init(self._start.clone(), evaluate, self.rngs)
            known = evaluate.first
        # anew: the search for a first step size is no move
        evaluate = _Watched(self.objective.for_update(batches, step=self.num_updates, inside=inside))
        before = state.theta
        state, info = kernel.step(state, evaluate, self.rngs)
        self._require_finite({f"{name} after the update": value for name, value in state._asdict().items()})
        if evaluate.first is not None and evaluate.last is not None:
            # the loss of a chain that refused its proposal is not the proposal's
            stays = (state.theta == before).all(1)
            self.loss = torch.where(stays, evaluate.first if known is None else known, evaluate.last)
        return before, state, {**info, **evaluate.info()}

    @property
    def _splits_rows(self) -> bool:
        """True if this update estimates the variance of its gradient from halves of its batch.

        Every ``NOISE_PERIOD``-th update does, counted from the end of burn-in, and the last one. A run may be shorter
        than the period, and the first updates of a cycle may estimate a preconditioner and no noise.
        """
        if not self._watch_noise or self.num_updates < self._warm_start:
            return False
        period = (self.num_updates - self.problem.burn_in) % NOISE_PERIOD == 0
        return period or self.num_updates + 1 == self.problem.draw_steps[-1]

    def _require_finite(self, values: Mapping[str, Tensor]) -> None:
        """Raise a FloatingPointError if a number is not finite, naming chain and parameter.

        All numbers are first summed, in one pass over memory. Chain and parameter are searched only if a sum is not
        finite.

        Args:
            values: name for the message -> [M], or [M, ..., d].
        """
        floats = {what: value for what, value in values.items() if value.is_floating_point()}
        if bool(torch.stack([value.sum().double() for value in floats.values()]).isfinite().all()):
            return
        words = self.objective.words
        for what, value in floats.items():
            bad = ~value.isfinite()
            if not bool(bad.any()):  # the sum of large numbers overflows, too
                continue
            rows = bad.flatten(1).any(1).nonzero()[:, 0].tolist() if value.ndim > 1 else bad.nonzero()[:, 0].tolist()
            chains = [self.chains[row] for row in rows]
            named = f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains))}"
            if value.ndim > 1 and value.shape[-1] == self._start.shape[1]:
                named += self.objective.place_of(int(bad[rows[0]].reshape(-1, value.shape[-1]).any(0).nonzero()[0, 0]))
            raise FloatingPointError(
                f"non-finite {what} at {words.step} {self.num_updates + 1} ({named}): {words.advice}"
            )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a resume needs, except the number of updates: name -> [M, ...] on the CPU."""
        if self.state is None:
            return {}
        dim = self._start.shape[1]
        draws = torch.stack(self.draws, 1) if self.draws else torch.zeros(len(self.chains), 0, dim)
        held = {} if self.loss is None or not self.method.is_exact else {"held.loss": self.loss.cpu()}
        return {
            **{f"state.{name}": value.detach().cpu() for name, value in self.state._asdict().items()},
            "generator": torch.stack([rng.get_state() for rng in self.rngs]),
            "draws": draws,
            **held,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Restore the run from the tensors of ``state_dict``.

        Raises:
            ValueError: for tensors of another method, naming the fields.
        """
        template, device = self.template(), self._start.device
        names = {f"state.{name}" for name in template._fields} | {"generator", "draws"}
        found = {name for name in tensors if name != "held.loss"}
        if found != names:
            raise ValueError(
                f"the checkpoint's chains have tensors {sorted(found)}, expected {sorted(names)}: it was written by "
                "another method"
            )
        self.state = type(template)(**{name: tensors[f"state.{name}"].to(device) for name in template._fields})
        for rng, state in zip(self.rngs, tensors["generator"], strict=True):
            rng.set_state(state.clone())  # a view of the stack is read from its first row
        self.draws = list(tensors["draws"].unbind(1))
        held = tensors.get("held.loss")
        self.loss = None if held is None else held.to(device)
        self.num_updates = num_updates

    def template(self) -> State:
        """Return a state of this method, of which only the fields matter; its generators are thrown away."""
        theta = self._start.clone()
        rngs = [torch.Generator(device=rng.device) for rng in self.rngs]
        if isinstance(self.method, Rule):
            started: State = self.method.init(theta, rngs)
            return started
        zeros = Evaluation(torch.zeros(len(theta), dtype=theta.dtype, device=theta.device), torch.zeros_like(theta))
        kernel: Kernel[State] = self.method
        state: State = kernel.init(theta, lambda theta, *, gradient=True, batches=None: zeros, rngs)
        return state


class _Watched:
    """An update's objective that keeps the loss of its first and of its last evaluation."""

    def __init__(self, evaluate: UpdateObjective) -> None:
        self._evaluate = evaluate
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.info = evaluate.info

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        evaluation = self._evaluate(theta, gradient=gradient, batches=batches)
        self.last = evaluation.loss
        self.first = self.last if self.first is None else self.first
        return evaluation
