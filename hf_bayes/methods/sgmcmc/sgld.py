"""SGLD: stochastic gradient Langevin dynamics, the overdamped limit (posteriors app. B.1; Welling and Teh 2011).

    theta_t = theta_{t-1} - (l_t / N) grad U(theta_{t-1}) + sqrt(2 (l_t / N) T) R_t

l is SGD's learning rate: at T = 0 this is ``torch.optim.SGD`` on U / N. In posteriors' B.1, epsilon is l, and the Bayes
posterior has temperature 1 / N: T here is N times theirs. Welling and Teh's epsilon is 2 l / N.

Stationary law for U = lambda theta^2 / 2 and constant l:

    E theta^2 = (T / lambda) / (1 - l lambda / (2 N))

A gradient of U with noise of variance V adds l V / (2 N) to T. It is SGHMC with momentum 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import grad_energy
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig, noise_ratio


class SGLDState(NamedTuple):
    """The position of the chains."""

    theta: Tensor
    """[M, d]"""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class SGLDConfig(LangevinConfig):
    """Langevin dynamics without momentum. At T = 0 it is ``torch.optim.SGD``, step for step."""

    name: ClassVar[str] = "sgld"

    def build(self, problem: Problem) -> Rule[SGLDState]:
        def init(theta: Tensor, rngs: Rngs) -> SGLDState:
            return SGLDState(theta, torch.zeros(len(theta), dtype=torch.int64, device=theta.device))

        def update(state: SGLDState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SGLDState, Info]:
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            step_size = lr / problem.num_data
            noise = math.sqrt(2 * step_size * self.temperature) * randn(rngs, state.theta)
            theta = state.theta - step_size * gradient + noise
            # cold_posteriors eq. 43; its mean is T (eq. 44)
            info = {"configurational_temperature": (state.theta * gradient).mean(1)}
            injected = 2 * step_size * self.temperature
            info |= noise_ratio(evaluation.grad_variance, problem, injected=injected, squared_step=step_size**2)
            return SGLDState(theta, state.step + 1), info

        return Rule(init, locate_at_theta, update, keep_draws)
