"""SGNHT: the stochastic-gradient Nosé-Hoover thermostat (Ding et al. 2014, Algorithm 2; posteriors app. B.3).

    h_t = sqrt(l_t / N)                        as in sghmc; l_0 the peak of the schedule
    A = (1 - beta) / h_0                       fixes the injected noise
    m_t = (1 - h_t xi_{t-1}) m_{t-1} - h_t grad U(theta_{t-1}) + sqrt(2 A h_t T) R_t
    theta_t = theta_{t-1} + h_t m_t
    xi_t = xi_{t-1} + (h_t / mu) (|m_t|^2 / d - T)                    one friction xi for all of a chain

The friction of SGHMC adapts: it rises until the kinetic temperature is T, whatever the noise of the gradient. This is
Ding's order. Posteriors B.3 moves theta and xi with m_{t-1} (``order="euler"``; the printed position step has sigma^-1,
the SDE has sigma^-2). Both papers have mu = 1, and in these units xi then takes about (1 - beta) N / l updates to
react. Here mu = 2 T (tau h_0)^2, tau = ``thermostat_steps``. Near its balance xi'' + 2 A xi' + xi / (tau h_0)^2 = 0.
Damping is critical at tau = 1 / (1 - beta); for larger tau it is slow: 2 (1 - beta) tau^2 updates.

Stationary law of the dynamics: exp(-U / T) N(m; 0, T) N(xi; A, T / (mu d)). Stationary law of the discretisation for
U = lambda theta^2 / 2, constant l, x = h^2 lambda, a gradient of U with noise of variance V, and d so large that xi is
constant:

    E m^2 = T            E theta^2 = (T / lambda) (1 - a / 2)
    a = h xi: the smaller root of a^2 - (2 - x / 2) a + c = 0, c = 2 (1 - beta) + h^2 V / T

and with ``order="euler"`` E theta^2 = (T / lambda) (1 - a / 2 + x / 2), a^2 - (2 + 3 x / 2) a + 2 x + x^2 / 2 + c = 0.
Without a real root, an update adds more noise than any friction can remove, and the chain diverges: use a smaller
learning rate or a larger batch. Weak order 1 in h. There is no T = 0 limit: xi could only rise (posteriors app. C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import grad_energy
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig, noise_ratio


class SGNHTState(NamedTuple):
    """Position, momentum and thermostat."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] unit mass, variance T."""
    friction: Tensor
    """[M] xi; h xi is the share of the momentum that an update removes."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class SGNHTConfig(LangevinConfig):
    """SGHMC with adaptive friction, whose kinetic temperature is T under gradient noise of unknown size.

    Attributes:
        momentum: beta in (1/2, 1), SGD's momentum if gradients had no noise.
        thermostat_steps: tau, the number of updates at the peak learning rate in which the friction reacts.
        order: "symplectic" moves theta and the friction with the new momentum, "euler" with the old one.
    """

    name: ClassVar[str] = "sgnht"
    momentum: float = 0.9
    thermostat_steps: float = 10.0
    order: Literal["symplectic", "euler"] = "symplectic"

    def __post_init__(self) -> None:
        super().__post_init__()
        # at beta = 1/2 the injected noise alone heats the momenta to T in every update
        self._check_number("momentum", self.momentum, minimum=0.5, maximum=1.0, strict=True)
        self._check_number("thermostat_steps", self.thermostat_steps, minimum=0.0, strict=True)
        self._check_choice("order", self.order, ("symplectic", "euler"))
        if self.temperature == 0:
            raise ValueError(
                "sgnht: temperature must be > 0, got 0: the friction of a thermostat at T = 0 only rises. Use sghmc"
            )

    def build(self, problem: Problem) -> Rule[SGNHTState]:
        peak, temperature = math.sqrt(problem.learning_rate / problem.num_data), self.temperature
        injected = (1 - self.momentum) / peak
        thermostat_mass = 2 * temperature * (self.thermostat_steps * peak) ** 2

        def init(theta: Tensor, rngs: Rngs) -> SGNHTState:
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            momentum = math.sqrt(temperature) * randn(rngs, theta)
            return SGNHTState(theta, momentum, theta.new_full((len(theta),), injected), step)

        def update(state: SGNHTState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SGNHTState, Info]:
            h = math.sqrt(lr / problem.num_data)
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            noise = math.sqrt(2 * injected * h * temperature) * randn(rngs, state.theta)
            momentum = (1 - h * state.friction)[:, None] * state.momentum - h * gradient + noise
            moving = momentum if self.order == "symplectic" else state.momentum
            kinetic = moving.square().mean(1)
            friction = state.friction + h / thermostat_mass * (kinetic - temperature)
            info = {
                "kinetic_temperature": kinetic,
                "kinetic_temperature_law": torch.full_like(kinetic, temperature),
                "configurational_temperature": (state.theta * gradient).mean(1),  # cold_posteriors eq. 43
                # above 1 it removes gradient noise and curvature
                "friction_ratio": friction / injected,
                **noise_ratio(
                    evaluation.grad_variance, problem, injected=2 * injected * h * temperature, squared_step=h**2
                ),
            }
            return SGNHTState(state.theta + h * moving, momentum, friction, state.step + 1), info

        return Rule(init, locate_at_theta, update, keep_draws)
