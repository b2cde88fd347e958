"""A run of chains: the only owner of their states, draws and random generators.

``sample``, the trainer, the MAP reference and a loop of your own advance chains by the same ``Run.update``. It returns
a ``StepRecord``. The monitor of a trainer reads these records and nothing else of a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from hf_bayes.chains.finite import all_finite, not_finite, place_of, put_back, rows_not_finite
from hf_bayes.chains.objective import Objective, UpdateObjective
from hf_bayes.chains.watched_objective import WatchedObjective
from hf_bayes.core.types import Evaluate, Evaluation, FinalPassResult, Info, Kernel, Problem, Rngs, Rule, State
from hf_bayes.distributions.approximations import Draws

NOISE_PERIOD = 97
"""Updates between two estimates of the gradient's variance from parts of a batch. An estimate costs a quarter of a
gradient, 0.3 % of all gradients. The period is prime, so that no cycle of a schedule or of a preconditioner has the
same phase in all estimates."""

START_ADVICE = (
    "chains must start where it is finite. Use other starting points, a smaller init_jitter, or another warm start"
)


class StepRecord(NamedTuple):
    """The values of one update of all chains of a run, for observers. No update changes its tensors.

    Attributes:
        step: updates done, this one included.
        learning_rate: the step size of the update; None for a kernel, which has its own.
        before: [M, d] where the chains were.
        theta: [M, d] where they are now.
        momentum: [M, d] of a method that has one; None for others.
        info: the method's diagnostics, name -> [M].
        loss: [M] minus the mean log-likelihood of a term, in nats; None for an objective without terms.
        moved: True if a rule took a step. False if it only estimated something, and for a kernel.
        lost: [M] True for a chain that is out of a run with ``leaves_out_lost``; None for other runs.
    """

    step: int
    learning_rate: float | None
    before: Tensor
    theta: Tensor
    momentum: Tensor | None
    info: Mapping[str, Tensor]
    loss: Tensor | None
    moved: bool
    lost: Tensor | None = None


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

    A number that is not finite ends the run with a ``NotFiniteError``. With ``leaves_out_lost``, for trials of
    settings, a chain with such a number goes back to its start, and the run ends only if no chain is left. Only rules
    can do this, and a checkpoint does not hold which chains are lost.
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
        leaves_out_lost: bool = False,
    ) -> None:
        if leaves_out_lost and not isinstance(method, Rule):
            raise ValueError("leaves_out_lost=True needs a method with one gradient per update, got a kernel")
        self.method, self.objective, self.problem = method, objective, problem
        self.rngs = list(rngs)
        self.chains = range(len(theta)) if chains is None else chains
        self.state: State | None = None
        self.num_updates = 0
        self.draws: list[Tensor] = []
        self.loss: Tensor | None = None
        self._start, self._warm_start, self._draws_on = theta, warm_start, draws_on
        self._watch_noise = watch_noise
        self._lost = torch.zeros(len(theta), dtype=torch.bool, device=theta.device) if leaves_out_lost else None

    @property
    def theta(self) -> Tensor:
        """The positions of the chains [M, d]."""
        return self._start if self.state is None else self.state.theta

    @property
    def num_sampled(self) -> int:
        """The number of draws so far of each chain; ``draws`` of a run that was stopped may hold its last states."""
        return sum(step <= self.num_updates for step in self.problem.draw_steps)

    @torch.no_grad()
    def update(self, batches: list[Any], learning_rate: float | None = None) -> StepRecord:
        """Advance all chains by one update.

        Args:
            batches: the batches of the update, as the objective takes them.
            learning_rate: the step size of a rule.
        Raises:
            NotFiniteError: naming step, chain and parameter, before a number that is not finite enters the state.
        """
        if isinstance(self.method, Rule):
            before, self.state, info, moved = self._follow_rule(self.method, batches, learning_rate)
        else:
            before, self.state, info = self._follow_kernel(self.method, batches)
            learning_rate, moved = None, False
        self.num_updates += 1
        if self.num_updates in self.problem.draw_steps:
            self.take_draw()
        assert self.state is not None
        momentum: Tensor | None = getattr(self.state, "momentum", None)
        values = before, self.state.theta, momentum, info, self.loss
        return StepRecord(self.num_updates, learning_rate, *values, moved, self._lost)

    def take_draw(self) -> None:
        """Store the positions of the chains as a draw."""
        self.draws.append(self.theta.detach().to(self._draws_on, copy=True))

    def stacked_draws(self) -> Tensor:
        """Return a copy of the draws so far [M, S, d]."""
        return torch.stack(self.draws, 1) if self.draws else torch.zeros(len(self.chains), 0, self._start.shape[1])

    def finish(self, gather: Callable[[Tensor], Tensor] | None = None) -> FinalPassResult:
        """Return what the method builds from its draws, after one more pass over the data if it makes one.

        Before the first draw, the result is made of the states of the chains. If the method ``fits_given_points``, the
        run needs no update, and the result belongs to the points where the chains start. The run is not changed.

        Args:
            gather: [M, ...] of the chains of this process -> [K, ...] of the chains of all processes, for a result
                that stands for all of them. None: the result is that of the chains of this process.
        Raises:
            ValueError: before the first update, unless the method ``fits_given_points``.
        """
        method, final_pass = self.method, self.method.final_pass
        state: Any = self.state
        if state is None and not (isinstance(method, Rule) and method.fits_given_points):
            raise ValueError("the run has no update yet, so it has no state to finish: call update first")
        draws = self.stacked_draws() if self.draws else self.theta.detach().to(self._draws_on)[:, None]
        if final_pass is not None:
            return final_pass(state, draws if gather is None else gather(draws), self.objective)
        with torch.no_grad():
            found = method.finish(state, draws)
            if isinstance(found, Draws):
                return FinalPassResult(dataclasses.replace(found, chain=found.chain + self.chains.start), {})
            if gather is not None:
                state = type(state)(**{name: gather(value) for name, value in state._asdict().items()})
                found = method.finish(state, draws)
        return FinalPassResult(found, {})

    # -- updates ---------------------------------------------------------------------------------------------------

    def _follow_rule(
        self, rule: Rule[State], batches: list[Any], learning_rate: float | None
    ) -> tuple[Tensor, State, Info, bool]:
        if learning_rate is None or not 0 <= learning_rate < math.inf:
            raise ValueError(
                f"the learning rate of step {self.num_updates + 1} is {learning_rate}, it must be a finite number "
                ">= 0: check the schedule and callbacks"
            )
        state = rule.init(self._start.clone(), self.rngs) if self.state is None else self.state
        if self.num_updates in rule.early_passes:
            state = rule.early_passes[self.num_updates](state, self.objective)
        theta, state = rule.locate(state, self.rngs)
        before, moved = state.theta, learning_rate > 0 and not rule.estimates(state)
        evaluate = self.objective.for_update(batches, step=self.num_updates)
        anchor = rule.anchor(state)
        evaluation = evaluate(theta, split_rows=self._splits_rows, anchor=anchor)
        assert evaluation.grad_log_lik is not None
        words = self.objective.words
        self._require_finite({words.gradient: evaluation.grad_log_lik, words.value: evaluation.log_lik})
        if evaluation.anchor_grad is not None:
            self._require_finite({f"{words.gradient} at the anchor": evaluation.anchor_grad})
        after, info = rule.update(state, evaluation, learning_rate, self.rngs)
        self._require_finite({f"{name} after the update": value for name, value in after._asdict().items()})
        after = self._lost_at_start(rule, state, after)
        self.loss = evaluation.loss
        return before, after, {**info, **evaluate.info()}, moved

    def _follow_kernel(self, kernel: Kernel[State], batches: list[Any]) -> tuple[Tensor, State, Info]:
        state, known = self.state, self.loss
        if state is None:
            state, known = self._start_kernel(kernel.init, self._start.clone(), batches)
        if self.num_updates in kernel.later_starts:
            state, known = self._start_kernel(kernel.later_starts[self.num_updates], state, batches)
        evaluate = WatchedObjective(self._for_kernel(batches))
        before = state.theta
        state, info = kernel.step(state, evaluate, self.rngs)
        self._require_finite({f"{name} after the update": value for name, value in state._asdict().items()})
        if evaluate.first is not None and evaluate.last is not None:
            # the loss of a chain that refused its proposal is not the proposal's
            stays = (state.theta == before).all(1)
            self.loss = torch.where(stays, evaluate.first if known is None else known, evaluate.last)
        return before, state, {**info, **evaluate.info()}

    def _start_kernel(
        self, start: Callable[[Any, Evaluate, Rngs], State], at: Any, batches: list[Any]
    ) -> tuple[State, Tensor | None]:
        """Return the state of a kernel that starts at ``at``, and the loss there.

        The evaluations are apart from those of the first move: the search for a first step size is no move.

        Raises:
            FloatingPointError: if a chain starts where the log-likelihood, its gradient or the prior is not finite.
        """
        evaluate = WatchedObjective(self._for_kernel(batches), self._require_start)
        return start(at, evaluate, self.rngs), evaluate.first

    def _for_kernel(self, batches: list[Any]) -> UpdateObjective:
        return self.objective.for_update(batches, step=self.num_updates, inside=self.theta)

    def _require_start(self, theta: Tensor, evaluation: Evaluation) -> None:
        words = self.objective.words
        values = {words.value: evaluation.log_lik, "log-prior": self.problem.prior.log_prob(theta)}
        if evaluation.grad_log_lik is not None:
            values[words.gradient] = evaluation.grad_log_lik
        self._require_finite(values, advice=START_ADVICE)

    @property
    def _splits_rows(self) -> bool:
        """True if this update estimates the variance of its gradient from parts of its batch.

        Every ``NOISE_PERIOD``-th update does, counted from the end of burn-in, and the last one. A run may be shorter
        than the period, and the first updates of a cycle may estimate a preconditioner and no noise.
        """
        if not self._watch_noise or self.num_updates < self._warm_start:
            return False
        period = (self.num_updates - self.problem.burn_in) % NOISE_PERIOD == 0
        return period or self.num_updates + 1 == self.problem.draw_steps[-1]

    def _require_finite(self, values: Mapping[str, Tensor], *, advice: str | None = None) -> None:
        """Raise a NotFiniteError if a number is not finite; if lost chains are left out, only without any other chain.

        Args:
            values: name for the message -> [M], or [M, ..., d].
            advice: the end of the message, which says what to do; None takes the advice of the objective.
        """
        floats = {what: value for what, value in values.items() if value.is_floating_point()}
        if all_finite(floats.values()):
            return
        for what, value in floats.items():
            bad = rows_not_finite(value)
            rows = bad.nonzero()[:, 0].tolist()
            if not rows:  # the sum of large numbers overflows, too
                continue
            if self._lost is not None:
                self._lost = self._lost | bad
                if not bool(self._lost.all()):
                    continue
            has_columns = value.ndim > 1 and value.shape[-1] == self._start.shape[1]
            place = place_of(value, rows[0], self.objective) if has_columns else ""
            chains = [self.chains[row] for row in rows]
            raise not_finite(what, self.num_updates + 1, chains, place, self.objective.words, advice)

    def _lost_at_start(self, rule: Rule[State], before: State, after: State) -> State:
        """Return the state after an update, with lost chains at the start, where the objective can be evaluated."""
        if self._lost is None or not bool(self._lost.any()):
            return after
        rows = self._lost.nonzero()[:, 0].tolist()
        first = rule.init(self._start[rows], [self.rngs[row] for row in rows] if self.rngs else ())
        return put_back(before, after, first, rows)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a resume needs, except the number of updates: name -> [M, ...] on the CPU."""
        if self.state is None:
            return {}
        held = {} if self.loss is None or not self.method.is_exact else {"held.loss": self.loss.cpu()}
        return {
            **{f"state.{name}": value.detach().cpu() for name, value in self.state._asdict().items()},
            "generator": torch.stack([rng.get_state() for rng in self.rngs]),
            "draws": self.stacked_draws(),
            **held,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Restore the run from the tensors of ``state_dict``.

        Raises:
            ValueError: for tensors of another method, naming the fields.
        """
        kind: Any = type(self.template())  # a template is as large as the state: keep none
        device = self._start.device
        names = {f"state.{name}" for name in kind._fields} | {"generator", "draws"}
        found = {name for name in tensors if name != "held.loss"}
        if found != names:
            raise ValueError(
                f"the checkpoint's chains have tensors {sorted(found)}, expected {sorted(names)}: it was written by "
                "another method"
            )
        self.state = kind(**{name: tensors[f"state.{name}"].to(device) for name in kind._fields})
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
