"""SGD-MC: the iterates of SGD at a constant rate as draws (Mandt, Hoffman and Blei 2017).

    v_t = beta v_{t-1} + grad U(theta_{t-1}) / N,   theta_t = theta_{t-1} - l v_t          (``torch.optim.SGD``)

There is no noise but that of the minibatches. Stationary law for U / N with Hessian A, at whose gradient minibatches
make noise of covariance C, and beta = 0: the covariance S solves

    S = (I - l A) S (I - l A) + l^2 C;   to first order in l   A S + S A = l C

It is the posterior's only if C is A times a number. Their optimal constant rate is where the noise of the minibatches
has the posterior's temperature in the mean over coordinates: l V / (2 N (1 - beta)) = 1, V the variance of an element
of grad U.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements, need_of_gradient_variance
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy, grad_energy


class SGDState(NamedTuple):
    """What ``torch.optim.SGD`` remembers."""

    theta: Tensor
    """[M, d]"""
    velocity: Tensor
    """[M, d] its momentum buffer."""
    step: Tensor
    """[M] int64 updates done."""


@dataclass(frozen=True, kw_only=True)
class SGDMCConfig(MethodConfig):
    """Iterates of SGD on U / N, ``draws_per_chain`` of them spread over the updates after burn-in.

    Attributes:
        momentum: SGD's beta.
        measure_gradient_noise: report ``noise_temperature``, l V / (2 N (1 - beta)): 1 at the optimal rate. True:
            of each update, which takes two micro-batches; None: of about every hundredth, where there is only one.
    """

    name: ClassVar[str] = "sgd_mc"
    num_chains: int = 1
    draws_per_chain: int = 20
    temperature: float = 0.0
    init_jitter: float = 0.0
    momentum: float = 0.0
    measure_gradient_noise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        if self.measure_gradient_noise is not None:
            self._check_flag("measure_gradient_noise", self.measure_gradient_noise)
        if self.temperature != 0:
            raise ValueError(
                f"{self.name}: temperature must be 0, got {self.temperature!r}: SGD adds no noise, its learning rate "
                "and batch size set how far it moves. Leave it out, or use a sampler such as sgld"
            )

    @property
    def requirements(self) -> Requirements:
        return Requirements(gradient_variance=need_of_gradient_variance(self.measure_gradient_noise))

    def build(self, problem: Problem) -> Rule:
        def update(state: SGDState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SGDState, Info]:
            return descend(state, evaluation, problem, lr, config=self)

        return Rule(begin, locate_at_theta, update, lambda state, draws: Draws.from_chains(draws))


def begin(theta: Tensor, rngs: Rngs) -> SGDState:
    """SGD before its first step."""
    step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
    return SGDState(theta, torch.zeros_like(theta), step)


def descend(
    state: SGDState, evaluation: Evaluation, problem: Problem, lr: float, *, config: SGDMCConfig
) -> tuple[SGDState, Info]:
    """One step of SGD on U / N."""
    gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=config.prior_weight)
    velocity = config.momentum * state.velocity + gradient / problem.num_data
    info = {"energy": energy(evaluation, state.theta, problem.prior, prior_weight=config.prior_weight)}
    if evaluation.grad_variance is not None:
        sizes = torch.tensor(problem.sizes).to(gradient)
        variance = (evaluation.grad_variance * sizes).sum(1) / sizes.sum()
        info["noise_temperature"] = lr * variance / (2 * problem.num_data * (1 - config.momentum))
    return SGDState(state.theta - lr * velocity, velocity, state.step + 1), info
