"""SGHMC in the Euler form of posteriors app. B.2: theta moves with the old momentum.

    h_t, gamma, beta_t                         as in sghmc
    theta_t = theta_{t-1} + h_t m_{t-1}
    m_t = beta_t m_{t-1} - h_t grad U(theta_{t-1}) + sqrt(2 gamma h_t T) R_t

In terms of the symbols of B.2, on the right: l = (epsilon / sigma)^2, 1 - beta = epsilon alpha / sigma^2,
m = sqrt(N) m / sigma, and T = N times their temperature. ``sghmc`` is the better choice; this form is for comparison
with posteriors.

Stationary law for U = lambda theta^2 / 2, constant l, b = beta and x = h^2 lambda:

    E theta^2 = (T / lambda) (1 - b) (1 + b + x) / ((1 - b - x) (1 + b + x / 2))
    E m^2 = 2 T (1 - b) / ((1 - b - x) (1 + b + x / 2))

so it is stable only for x < 1 - beta, while sghmc is stable for x < 2 (1 + beta). A gradient of U with noise of
variance V adds h^2 V / (2 (1 - b)) to T. Weak order 1 in h. At T = 0 and constant l, theta_{t+1} is the
position of ``torch.optim.SGD(momentum=beta)`` with gradients taken one update earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import grad_energy
from hf_bayes.methods.sgmcmc.gradient_noise import (
    LangevinConfig,
    empty_noise_statistics,
    needs_of_correction,
    noise_ratio,
    remaining_std,
)
from hf_bayes.methods.sgmcmc.sghmc import friction_of, step_size_and_decay


class SGHMCEulerState(NamedTuple):
    """Position and momentum."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] unit mass, variance about T."""
    step: Tensor
    """[M] int64, number of updates done."""
    noise_statistics: Tensor
    """[M, 3 + S] a ``gradient_noise.NoiseStatistics``; constant without a correction."""


@dataclass(frozen=True, kw_only=True)
class SGHMCEulerConfig(LangevinConfig):
    """Euler-Maruyama SGHMC, the form of the posteriors library.

    Attributes:
        correct_gradient_noise: inject less noise, by the measured noise of the gradient (Chen et al. 2014).
        momentum: beta in [0, 1); the friction is (1 - beta) sqrt(N / l_0).
    """

    name: ClassVar[str] = "sghmc_euler"
    correct_gradient_noise: bool = False
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("correct_gradient_noise", self.correct_gradient_noise)
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)

    @property
    def requirements(self) -> Requirements:
        # at the largest step of whitened coordinates, x = .04, the law above has 1.69 T / lambda at beta = .9
        needs = replace(super().requirements, learning_rate="given")
        return needs_of_correction(needs) if self.correct_gradient_noise else needs

    def build(self, problem: Problem) -> Rule[SGHMCEulerState]:
        friction, temperature = friction_of(problem, self.momentum), self.temperature

        def init(theta: Tensor, rngs: Rngs) -> SGHMCEulerState:
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            noise_statistics = empty_noise_statistics(theta, problem)
            return SGHMCEulerState(theta, math.sqrt(temperature) * randn(rngs, theta), step, noise_statistics)

        def update(
            state: SGHMCEulerState, evaluation: Evaluation, lr: float, rngs: Rngs
        ) -> tuple[SGHMCEulerState, Info]:
            h, decay = step_size_and_decay(lr, problem, self.momentum, name=self.name)
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            injected = 2 * friction * h * temperature
            noise_std: float | Tensor = math.sqrt(injected)
            noise_statistics, variance = state.noise_statistics, evaluation.grad_variance
            if self.correct_gradient_noise:
                noise_std, noise_statistics = remaining_std(
                    noise_statistics,
                    state.step,
                    variance,
                    problem,
                    name=self.name,
                    injected=injected,
                    squared_step=h**2,
                )
            theta = state.theta + h * state.momentum
            momentum = decay * state.momentum - h * gradient + noise_std * randn(rngs, state.theta)
            kinetic = momentum.square().mean(1)
            info = {
                "kinetic_temperature": kinetic,
                "kinetic_temperature_law": torch.full_like(kinetic, 2 * temperature / (1 + decay)),  # x -> 0
                "configurational_temperature": (state.theta * gradient).mean(1),  # cold_posteriors eq. 43
                **noise_ratio(variance, problem, injected=injected, squared_step=h**2),
            }
            return SGHMCEulerState(theta, momentum, state.step + 1, noise_statistics), info

        return Rule(init, locate_at_theta, update, keep_draws)
