"""MAP: AdamW on U / N to one point per chain, as a method and as the warm start of other methods.

    theta_t = theta_{t-1} - l_t mhat_t / (sqrt(vhat_t) + 1e-8),   m, v the running means of g = grad U / N and g^2

Kingma and Ba (2015) with beta_2 = 0.999. There is no weight decay: the prior is part of U, and AdamW's decoupled
decay is not a Gaussian prior (its strength depends on the preconditioner). There is no stationary law: this is
optimisation, at T = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.config import MODE_PRIOR_SCALE, MethodConfig
from hf_bayes.core.joined_states import inner_state, joined_state, with_inner
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import spare_generators
from hf_bayes.core.types import (
    Approximation,
    DataPasses,
    EarlyPass,
    Evaluate,
    Evaluation,
    FinalPassResult,
    Info,
    Kernel,
    Problem,
    Rngs,
    Rule,
    locate_at_theta,
)
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy, grad_energy

BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8


class MAPState(NamedTuple):
    """The state of AdamW."""

    theta: Tensor
    """[M, d]"""
    first_moment: Tensor
    """[M, d] running mean of the gradient of U / N."""
    second_moment: Tensor
    """[M, d] running mean of its square."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class MAPConfig(MethodConfig):
    """The maximum of the posterior by AdamW, or of the likelihood with ``temper="likelihood"``.

    A chain ends in one draw.

    Attributes:
        momentum: AdamW's beta_1; 0 is AdamW without momentum.
    """

    name: ClassVar[str] = "map"
    num_chains: int = 1
    temperature: float = 0.0
    init_jitter: float = 0.0
    momentum: float = BETA_1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        if self.temperature != 0:
            raise ValueError(
                f"{self.name}: temperature must be 0, got {self.temperature!r}: a maximum has no temperature. Leave it "
                "out, or use a sampler such as sghmc"
            )
        if self.draws_per_chain != 1:
            raise ValueError(
                f"{self.name}: draws_per_chain must be 1, got {self.draws_per_chain!r}: a chain ends in one point. Use "
                "num_chains for more members"
            )

    @property
    def requirements(self) -> Requirements:
        return Requirements(learning_rate="range_test", ends_at_map=True, mode_prior_scale=MODE_PRIOR_SCALE)

    def build(self, problem: Problem) -> Rule[Any]:  # a subclass may have another state
        def update(state: MAPState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MAPState, Info]:
            return descend(state, evaluation, problem, lr, momentum=self.momentum, prior_weight=self.prior_weight)

        def finish(state: MAPState, draws: Tensor) -> Draws:
            return Draws.from_chains(draws[:, -1:])

        return Rule(begin, locate_at_theta, update, finish)


def begin(theta: Tensor, rngs: Rngs) -> MAPState:
    """Return the state of AdamW before its first step."""
    step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
    return MAPState(theta, torch.zeros_like(theta), torch.zeros_like(theta), step)


def descend(
    state: MAPState,
    evaluation: Evaluation,
    problem: Problem,
    lr: float | Tensor,
    *,
    momentum: float,
    prior_weight: float,
) -> tuple[MAPState, Info]:
    """Return the state after one step of AdamW on U / N, and the energy; ``lr`` may be [M, 1]."""
    gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=prior_weight)
    info = {"energy": energy(evaluation, state.theta, problem.prior, prior_weight=prior_weight)}
    return adamw(state, gradient, lr, momentum=momentum, num_data=problem.num_data), info


def adamw(state: MAPState, gradient: Tensor, lr: float | Tensor, *, momentum: float, num_data: float) -> MAPState:
    """Return the state after one step of AdamW on U / N; ``gradient`` [M, d] is the gradient of U."""
    step = state.step + 1
    # in float64: in float32, 1 - 0.999 ** t has only four correct digits at the start
    first_bias, second_bias = ((1 - beta ** step.double()).to(gradient)[:, None] for beta in (momentum, BETA_2))

    def advance(gradient: Tensor, theta: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        gradient = gradient / num_data
        first = momentum * first + (1 - momentum) * gradient
        second = BETA_2 * second + (1 - BETA_2) * gradient.square()
        return theta - lr * (first / first_bias) / ((second / second_bias).sqrt() + EPSILON), first, second

    theta, first, second = in_blocks(advance, gradient, state.theta, state.first_moment, state.second_moment)
    return MAPState(theta, first, second, step)


def rate_of_warm_start(learning_rate: float, step: int, steps: int, *, decays: bool) -> float:
    """Return the step size of AdamW in update ``step``, from 0, of a warm start of ``steps`` updates."""
    return learning_rate * (1 - step / steps) if decays else learning_rate


def warm_start(
    rule: Rule[Any],
    *,
    steps: int,
    learning_rate: float,
    problem: Problem,
    prior_weight: float = 1.0,
    decays: bool = False,
) -> Rule[Any]:
    """Return a rule that runs AdamW on U / N for ``steps`` updates, and then ``rule`` from the point reached.

    With ``decays`` its step size falls linearly to 0.

    Its state holds the fields of the rule's state, which are not used before the switch, and the optimiser's fields as
    ``warm_*``. So one set of tensors restores any update of the run. The optimiser uses no random numbers: the rule is
    the first to use the chains' generators.
    """

    def init(theta: Tensor, rngs: Rngs) -> Any:
        return _warming(begin(theta, rngs), rule.init(theta, spare_generators(rngs)))

    def locate(state: Any, rngs: Rngs) -> tuple[Tensor, Any]:
        if _is_warming(state, steps):
            return state.theta, state
        theta, inner = rule.locate(inner_state(state), rngs)
        return theta, with_inner(state, inner)

    def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        if not _is_warming(state, steps):
            inner, info = rule.update(inner_state(state), evaluation, lr, rngs)
            return with_inner(state, inner), info
        rate = rate_of_warm_start(learning_rate, int(state.warm_step[0]), steps, decays=decays)
        warm, info = descend(_optimiser(state), evaluation, problem, rate, momentum=BETA_1, prior_weight=prior_weight)
        state = _warming(warm, inner_state(state))
        return (with_inner(state, rule.init(warm.theta, rngs)) if not _is_warming(state, steps) else state), info

    def rescale(state: Any, ratio: float) -> Any:
        return state if _is_warming(state, steps) else with_inner(state, rule.rescale(inner_state(state), ratio))

    def restart(state: Any, chains: Tensor) -> Any:
        return state if _is_warming(state, steps) else with_inner(state, rule.restart(inner_state(state), chains))

    def anchor(state: Any) -> Tensor | None:
        return None if _is_warming(state, steps) else rule.anchor(inner_state(state))

    def estimates(state: Any) -> bool:
        return not _is_warming(state, steps) and rule.estimates(inner_state(state))

    finish, final_pass = _end_of(rule)
    early_passes = {steps + number: _early_pass_of(each) for number, each in rule.early_passes.items()}
    return rule._replace(
        init=init, locate=locate, update=update, finish=finish, final_pass=final_pass, early_passes=early_passes,
        anchor=anchor, rescale=rescale, restart=restart, estimates=estimates,
    )  # fmt: skip


def _early_pass_of(early_pass: EarlyPass) -> EarlyPass:
    """Return an early pass of the rule, for the state with the optimiser's fields."""
    return lambda state, passes: with_inner(state, early_pass(inner_state(state), passes))


def _end_of(
    rule: Rule[Any],
) -> tuple[Callable[[Any, Tensor], Approximation], Callable[[Any, Tensor, DataPasses], FinalPassResult] | None]:
    """Return ``finish`` and ``final_pass`` of the rule, for the state with the optimiser's fields."""

    def finish(state: Any, draws: Tensor) -> Approximation:
        return rule.finish(inner_state(state), draws)

    def final_pass(state: Any, draws: Tensor, passes: DataPasses) -> FinalPassResult:
        assert rule.final_pass is not None
        return rule.final_pass(inner_state(state), draws, passes)

    return finish, None if rule.final_pass is None else final_pass


def warm_start_kernel(
    kernel: Kernel[Any], *, steps: int, learning_rate: float, problem: Problem, prior_weight: float = 1.0
) -> Kernel[Any]:
    """Return a kernel whose first ``steps`` moves are steps of AdamW, with one evaluation each; see ``warm_start``.

    The kernel starts before the move that follows, so that the loss of the last step of AdamW is its own.
    """

    def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> Any:
        return _warming(begin(theta, rngs), kernel.init(theta, evaluate, spare_generators(rngs)))

    def step(state: Any, evaluate: Evaluate, rngs: Rngs) -> tuple[Any, Info]:
        if not _is_warming(state, steps):
            inner, info = kernel.step(inner_state(state), evaluate, rngs)
            return with_inner(state, inner), info
        warm, info = descend(
            _optimiser(state),
            evaluate(state.theta),
            problem,
            learning_rate,
            momentum=BETA_1,
            prior_weight=prior_weight,
        )
        return _warming(warm, inner_state(state)), info

    def begin_kernel(state: Any, evaluate: Evaluate, rngs: Rngs) -> Any:
        return with_inner(state, kernel.init(state.theta, evaluate, rngs))

    def finish(state: Any, draws: Tensor) -> Approximation:
        return kernel.finish(inner_state(state), draws)

    return Kernel(init, step, finish, later_starts={steps: begin_kernel})


def _warming(warm: MAPState, inner: Any) -> Any:
    """Return the state during the warm start, with the optimiser's theta."""
    own = {
        "theta": warm.theta, "warm_first_moment": warm.first_moment, "warm_second_moment": warm.second_moment,
        "warm_step": warm.step,
    }  # fmt: skip
    return joined_state(own, inner)


def _is_warming(state: Any, steps: int) -> bool:
    return int(state.warm_step[0]) < steps  # all chains have done the same number of updates


def _optimiser(state: Any) -> MAPState:
    return MAPState(state.theta, state.warm_first_moment, state.warm_second_moment, state.warm_step)
