"""SGD-MC: the iterates of SGD at a constant rate as draws (Mandt, Hoffman and Blei 2017).

    v_t = beta v_{t-1} + grad U(theta_{t-1}) / N,   theta_t = theta_{t-1} - l v_t          (``torch.optim.SGD``)

The only noise is the noise of the minibatches. Let U / N have the Hessian A, let its minibatch gradient have noise of
covariance C, and let beta = 0. Then the covariance S of the stationary law solves

    S = (I - l A) S (I - l A) + l^2 C;   to first order in l   A S + S A = l C

It is the covariance of the posterior only if C is a multiple of A. At their optimal constant rate the minibatch noise
has the temperature of the posterior, in the mean over coordinates: l V / (2 N (1 - beta)) = 1, with V the variance of
an element of grad U.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MODE_PRIOR_SCALE, MethodConfig
from hf_bayes.core.requirements import Requirements, need_of_gradient_variance
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import energy, grad_energy


class SGDState(NamedTuple):
    """The state of ``torch.optim.SGD``."""

    theta: Tensor
    """[M, d]"""
    velocity: Tensor
    """[M, d] SGD's momentum buffer."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class SGDMCConfig(MethodConfig):
    """Iterates of SGD on U / N, ``draws_per_chain`` of them spread over the updates after burn-in.

    Attributes:
        momentum: SGD's beta.
        measure_gradient_noise: report ``noise_temperature``, l V / (2 N (1 - beta)), which is 1 at the optimal rate.
            True: in every update, which requires two micro-batches. None: as True where there are several
            micro-batches; with a single one, in about every hundredth update. False: never.
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
        refuse_temperature(self.name, self.temperature)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            mode_prior_scale=MODE_PRIOR_SCALE,
            gradient_variance=need_of_gradient_variance(self.measure_gradient_noise),
            gradient_variance_setting="measure_gradient_noise=True" if self.measure_gradient_noise else "",
        )

    def build(self, problem: Problem) -> Rule[SGDState]:
        def update(state: SGDState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SGDState, Info]:
            return descend(state, evaluation, problem, lr, config=self)

        return Rule(begin, locate_at_theta, update, keep_draws)


def refuse_temperature(method: str, temperature: float) -> None:
    """Raise a ValueError at T > 0."""
    if temperature != 0:
        raise ValueError(
            f"{method}: temperature must be 0, got {temperature!r}: SGD adds no noise, and its learning rate and batch "
            "size set the spread. Leave it out, or use a sampler such as sgld"
        )


def begin(theta: Tensor, rngs: Rngs) -> SGDState:
    """Return the state of SGD before its first step."""
    step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
    return SGDState(theta, torch.zeros_like(theta), step)


def descend(
    state: SGDState, evaluation: Evaluation, problem: Problem, lr: float, *, config: SGDMCConfig
) -> tuple[SGDState, Info]:
    """Return the state after one step of SGD on U / N, and the figures of the step."""
    gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=config.prior_weight)
    velocity = config.momentum * state.velocity + gradient / problem.num_data
    info = {"energy": energy(evaluation, state.theta, problem.prior, prior_weight=config.prior_weight)}
    if evaluation.grad_variance is not None:
        sizes = torch.tensor(problem.sizes).to(gradient)
        variance = (evaluation.grad_variance * sizes).sum(1) / sizes.sum()
        info["noise_temperature"] = lr * variance / (2 * problem.num_data * (1 - config.momentum))
    return SGDState(state.theta - lr * velocity, velocity, state.step + 1), info
