"""SGHMC: symplectic Euler Langevin dynamics with momentum (cold_posteriors eqs 8-10 and Algorithm 1 with M = I).

    h_t = sqrt(l_t / N)                        eq. 12, l_t the learning rate of update t, l_0 its peak
    gamma = (1 - beta) sqrt(N / l_0)           eq. 13, fixed under a schedule
    beta_t = 1 - h_t gamma                     eq. 11; beta at the peak, nearer to 1 below it
    m_t = beta_t m_{t-1} - h_t grad U(theta_{t-1}) + sqrt(2 gamma h_t T) R_t        eqs 8-9
    theta_t = theta_{t-1} + h_t m_t                                                 eq. 10

The state is the paper's m, in units where its law does not depend on l: theta moves by h_t m_t, so torch's momentum
buffer is -m_t / sqrt(N l_t). Algorithm 1 draws m_0 from N(0, I), the stationary law only at T = 1. Here m_0 ~ N(0, T).

Stationary law for U = lambda theta^2 / 2, constant l, b = beta (from the three equations of the second moments):

    E theta^2 = (T / lambda) / (1 - h^2 lambda / (2 (1 + b)))        E m^2 = 2 T / (1 + b - h^2 lambda / 2)

A gradient of U with noise of variance V adds h^2 V / (2 (1 - b)) to T, unless ``correct_gradient_noise`` injects h^2 V
less. As h^2 lambda -> 0 the target exp(-U / T) is left invariant, while E m^2 -> 2 T / (1 + b), not T: the noise of
eq. 9 is exact only as h gamma -> 0. At fixed gamma the stationary law of theta has an error of O(h^2), and the law of m
an error of O(h).

``preconditioner="layerwise"`` gives each tensor a mass M, with a new estimate in every cycle (``preconditioner``):

    n_t = beta_t n_{t-1} - h_t M^(-1/2) grad U(theta_{t-1}) + sqrt(2 gamma h_t T) R_t         eqs 8-9, n = M^(-1/2) m
    theta_t = theta_{t-1} + h_t M^(-1/2) n_t                                                  eq. 10

This is the same chain in theta M^(1/2): lambda / M replaces lambda in the stationary law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeVar

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
from hf_bayes.methods.sgmcmc.preconditioner import Layerwise


class SGHMCState(NamedTuple):
    """The position and Wenzel's momentum."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] m of eq. 8: unit mass, variance about T."""
    step: Tensor
    """[M] int64, number of updates done."""
    noise_statistics: Tensor
    """[M, 3 + S] a ``gradient_noise.NoiseStatistics``; constant without a correction."""


class PreconditionedSGHMCState(NamedTuple):
    """The state of SGHMC with a layerwise preconditioner."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] n = M^(-1/2) m: variance about T."""
    step: Tensor
    """[M] int64, number of updates done, including the updates of estimates."""
    noise_statistics: Tensor
    """[M, 3 + S] a ``gradient_noise.NoiseStatistics``; constant without a correction."""
    mass: Tensor
    """[M, S] M of each tensor."""
    squares: Tensor
    """[M, S] the sum of the current estimate of M, or of the last one."""


@dataclass(frozen=True, kw_only=True)
class SGHMCConfig(LangevinConfig):
    """Symplectic Euler SGHMC. At T = 0 and constant learning rate it is ``torch.optim.SGD(momentum=beta)``.

    Attributes:
        correct_gradient_noise: inject less noise, by the measured noise of the gradient (Chen et al. 2014).
        momentum: beta in [0, 1), as in SGD; the friction is (1 - beta) sqrt(N / l_0). 0 gives SGLD.
        preconditioner: "layerwise" gives each tensor a mass M (Algorithm 4), "identity" is M = I.
        preconditioner_batches: K, the number of updates for an estimate of the masses; theta does not move in them.
        preconditioner_period: number of updates from the beginning of one estimate to the next; None begins one with
            each cycle, that is after each draw.
    """

    name: ClassVar[str] = "sghmc"
    correct_gradient_noise: bool = False
    momentum: float = 0.9
    preconditioner: Literal["identity", "layerwise"] = "identity"
    preconditioner_batches: int = 32
    preconditioner_period: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("correct_gradient_noise", self.correct_gradient_noise)
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_choice("preconditioner", self.preconditioner, ("identity", "layerwise"))
        self._check_count("preconditioner_batches", self.preconditioner_batches, minimum=1)
        if self.preconditioner_period is not None:
            self._check_count("preconditioner_period", self.preconditioner_period, minimum=1)

    @property
    def requirements(self) -> Requirements:
        needs = super().requirements
        if self.correct_gradient_noise:
            needs = needs_of_correction(needs)
        if self.preconditioner == "identity":
            return needs
        return replace(needs, learning_rate="given", tensor_scales_setting=f"preconditioner={self.preconditioner!r}")

    def build(self, problem: Problem) -> Rule[SGHMCState] | Rule[PreconditionedSGHMCState]:
        dynamics = Dynamics(self, problem)
        if self.preconditioner == "layerwise":
            return self._build_preconditioned(dynamics)

        def update(state: SGHMCState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SGHMCState, Info]:
            gradient = dynamics.gradient(state.theta, evaluation)
            return dynamics.move(state, gradient, evaluation.grad_variance, lr, rngs, scale=1.0)

        return Rule(dynamics.start, locate_at_theta, update, keep_draws)

    def _build_preconditioned(self, dynamics: Dynamics) -> Rule[PreconditionedSGHMCState]:
        layerwise = Layerwise(dynamics.problem, self.preconditioner_batches, self.preconditioner_period)

        def init(theta: Tensor, rngs: Rngs) -> PreconditionedSGHMCState:
            return PreconditionedSGHMCState(*dynamics.start(theta, rngs), *layerwise.start(theta))

        def batches_seen(state: PreconditionedSGHMCState) -> int | None:
            return layerwise.batches_seen(int(state.step[0]))  # all chains have done the same number of updates

        def estimates(state: PreconditionedSGHMCState) -> bool:
            return batches_seen(state) is not None

        def update(
            state: PreconditionedSGHMCState, evaluation: Evaluation, lr: float, rngs: Rngs
        ) -> tuple[PreconditionedSGHMCState, Info]:
            gradient, variance = dynamics.gradient(state.theta, evaluation), evaluation.grad_variance
            seen = batches_seen(state)
            if seen is not None:
                mass, squares = layerwise.observe(state.mass, state.squares, gradient, seen)
                _, decay = step_size_and_decay(lr, dynamics.problem, self.momentum, name=self.name)
                observed = state._replace(mass=mass, squares=squares, step=state.step + 1)
                return observed, dynamics.temperatures(state.momentum, state.theta, gradient, decay)
            variance = None if variance is None else variance / state.mass
            return dynamics.move(state, gradient, variance, lr, rngs, scale=layerwise.scale(state.mass))

        return Rule(init, locate_at_theta, update, keep_draws, estimates=estimates)


AnyState = TypeVar("AnyState", SGHMCState, PreconditionedSGHMCState)


def friction_of(problem: Problem, beta: float) -> float:
    """Return gamma of eq. 13."""
    return (1 - beta) * math.sqrt(problem.num_data / problem.learning_rate)


def step_size_and_decay(lr: float, problem: Problem, beta: float, *, name: str) -> tuple[float, float]:
    """Return h_t and beta_t of an update of learning rate ``lr``; beta is its value at the peak.

    Raises:
        ValueError: if beta_t is negative: the update would reverse the momentum.
    """
    friction, peak = friction_of(problem, beta), problem.learning_rate
    h = math.sqrt(lr / problem.num_data)
    decay = 1 - h * friction
    if decay < -1e-12:  # beta = 0 at the peak is a decay of 0, up to rounding
        raise ValueError(
            f"{name} needs 1 - h * friction >= 0, got h={h:.4g}, friction={friction:.4g}: learning_rate "
            f"{lr:.4g} is above the peak {peak:.4g} that momentum={beta:g} fixed the friction for. "
            "Make the learning rate the schedule's largest value"
        )
    return h, decay


@dataclass(frozen=True)
class Dynamics:
    """Eqs 8-10 for one run, with or without a preconditioner."""

    config: SGHMCConfig
    problem: Problem

    @property
    def friction(self) -> float:
        """gamma of eq. 13."""
        return friction_of(self.problem, self.config.momentum)

    def start(self, theta: Tensor, rngs: Rngs) -> SGHMCState:
        """Return the state before the first update, with m_0 ~ N(0, T)."""
        temperature = self.config.temperature
        step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
        noise_statistics = empty_noise_statistics(theta, self.problem)
        return SGHMCState(theta, math.sqrt(temperature) * randn(rngs, theta), step, noise_statistics)

    def gradient(self, theta: Tensor, evaluation: Evaluation) -> Tensor:
        """Return grad U(theta) [M, d]."""
        return grad_energy(evaluation, theta, self.problem.prior, prior_weight=self.config.prior_weight)

    def move(
        self,
        state: AnyState,
        gradient: Tensor,
        variance: Tensor | None,
        lr: float,
        rngs: Rngs,
        *,
        scale: float | Tensor,
    ) -> tuple[AnyState, Info]:
        """Return the state after an update, and its figures.

        Args:
            gradient: [M, d] of U.
            variance: [M, S] of the noise of M^(-1/2) grad U; None if it is not known.
            scale: M^(-1/2), [M, d] or 1.
        """
        problem, config, friction, temperature = self.problem, self.config, self.friction, self.config.temperature
        h, decay = step_size_and_decay(lr, problem, config.momentum, name=config.name)
        injected = 2 * friction * h * temperature
        noise_std: float | Tensor = math.sqrt(injected)
        step_size, noise_statistics = h * scale, state.noise_statistics
        if config.correct_gradient_noise:
            noise_std, noise_statistics = remaining_std(
                noise_statistics, state.step, variance, problem, name=config.name, injected=injected, squared_step=h**2
            )
        # in place, because a temporary tensor takes as much memory as all chains
        momentum = (decay * state.momentum).sub_(step_size * gradient).add_(randn(rngs, state.theta).mul_(noise_std))
        theta = (step_size * momentum).add_(state.theta)
        moved = state._replace(theta=theta, momentum=momentum, step=state.step + 1, noise_statistics=noise_statistics)
        ratio = noise_ratio(variance, problem, injected=injected, squared_step=h**2)
        return moved, self.temperatures(momentum, state.theta, gradient, decay) | ratio

    def temperatures(self, momentum: Tensor, theta: Tensor, gradient: Tensor, decay: float) -> Info:
        """Return the kinetic and the configurational temperature, and the law of the kinetic one."""
        kinetic = momentum.square().mean(1)
        return {
            "kinetic_temperature": kinetic,
            # the limit h^2 lambda -> 0 of E m^2; under a schedule m follows it within 1 / (1 - decay^2) updates
            "kinetic_temperature_law": torch.full_like(kinetic, 2 * self.config.temperature / (1 + decay)),
            "configurational_temperature": (theta * gradient).mean(1),  # eq. 43; its mean is T, eq. 44
        }
