"""SGHMC: symplectic Euler Langevin dynamics with momentum (cold_posteriors eqs 8-10 and Algorithm 1 with M = I).

    h_t = sqrt(l_t / N)                        eq. 12, l_t the learning rate of update t, l_0 its peak
    gamma = (1 - beta) sqrt(N / l_0)           eq. 13, fixed under a schedule
    beta_t = 1 - h_t gamma                     eq. 11; beta at the peak, nearer to 1 below it
    m_t = beta_t m_{t-1} - h_t grad U(theta_{t-1}) + sqrt(2 gamma h_t T) R_t        eqs 8-9
    theta_t = theta_{t-1} + h_t m_t                                                 eq. 10

The state is the paper's m, in units where its law does not depend on l: theta moves by h_t m_t, so torch's momentum
buffer is -m_t / sqrt(N l_t). Algorithm 1 draws m_0 from N(0, I), the stationary law only at T = 1; here m_0 ~ N(0, T).

Stationary law for U = lambda theta^2 / 2, constant l, b = beta (solve the three equations that second moments obey):

    E theta^2 = (T / lambda) / (1 - h^2 lambda / (2 (1 + b)))        E m^2 = 2 T / (1 + b - h^2 lambda / 2)

A gradient of U with noise of variance V adds h^2 V / (2 (1 - b)) to T, unless ``correct_gradient_noise`` injects h^2 V
less. As h^2 lambda -> 0 the target exp(-U / T) is
left invariant while E m^2 -> 2 T / (1 + b), not T: the noise of eq. 9 is exact only as h gamma -> 0. At fixed gamma the
stationary law of theta is off by O(h^2), that of m by O(h).

``preconditioner="layerwise"`` gives each tensor a mass M, estimated anew in every cycle (``preconditioner``):

    n_t = beta_t n_{t-1} - h_t M^(-1/2) grad U(theta_{t-1}) + sqrt(2 gamma h_t T) R_t         eqs 8-9, n = M^(-1/2) m
    theta_t = theta_{t-1} + h_t M^(-1/2) n_t                                                  eq. 10

which is the same chain in theta M^(1/2): lambda / M takes the place of lambda in the stationary law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import grad_energy
from hf_bayes.methods.sgmcmc.gradient_noise import (
    CorrectedLangevinConfig,
    noise_ratio,
    open_account,
    remaining_std,
    require_friction,
)
from hf_bayes.methods.sgmcmc.preconditioner import Layerwise


class SGHMCState(NamedTuple):
    """Position and Wenzel's momentum."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] m of eq. 8: unit mass, variance about T."""
    step: Tensor
    """[M] int64 updates done."""
    account: Tensor
    """[M, 3 + S] of the noise that gradients bring (``gradient_noise.Account``); stands still without a correction."""


class PreconditionedSGHMCState(NamedTuple):
    """SGHMC's state and its layerwise preconditioner."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] n = M^(-1/2) m: variance about T."""
    step: Tensor
    """[M] int64 updates done, those of estimates included."""
    account: Tensor
    """[M, 3 + S] of the noise that gradients bring (``gradient_noise.Account``); stands still without a correction."""
    mass: Tensor
    """[M, S] M of each tensor."""
    squares: Tensor
    """[M, S] what the estimate under way (or the last one) has summed up."""


@dataclass(frozen=True, kw_only=True)
class SGHMCConfig(CorrectedLangevinConfig):
    """Symplectic Euler SGHMC. At T = 0 and constant learning rate it is ``torch.optim.SGD(momentum=beta)``.

    Attributes:
        momentum: beta in [0, 1), SGD's meaning; the friction is (1 - beta) sqrt(N / l_0). 0 gives SGLD.
        preconditioner: "layerwise" gives each tensor a mass M (Algorithm 4), "identity" is M = I.
        preconditioner_batches: K, updates that an estimate of the masses takes; theta does not move in them.
        preconditioner_period: updates from the beginning of one estimate to the next; None begins one with each
            cycle, that is after each draw.
    """

    name: ClassVar[str] = "sghmc"
    momentum: float = 0.9
    preconditioner: Literal["identity", "layerwise"] = "identity"
    preconditioner_batches: int = 32
    preconditioner_period: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_choice("preconditioner", self.preconditioner, ("identity", "layerwise"))
        self._check_count("preconditioner_batches", self.preconditioner_batches, minimum=1)
        if self.preconditioner_period is not None:
            self._check_count("preconditioner_period", self.preconditioner_period, minimum=1)

    def build(self, problem: Problem) -> Rule:
        peak, temperature = problem.learning_rate, self.temperature
        friction = (1 - self.momentum) * math.sqrt(problem.num_data / peak)

        layerwise = None
        if self.preconditioner == "layerwise":
            layerwise = Layerwise(problem, self.preconditioner_batches, self.preconditioner_period)

        def init(theta: Tensor, rngs: Rngs) -> Any:
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            account = open_account(theta, problem)
            state = SGHMCState(theta, math.sqrt(temperature) * randn(rngs, theta), step, account)
            return state if layerwise is None else PreconditionedSGHMCState(*state, *layerwise.start(theta))

        def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
            h = math.sqrt(lr / problem.num_data)
            decay = 1 - h * friction
            require_friction(self.name, decay, h=h, friction=friction, lr=lr, peak=peak, beta=self.momentum)
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            injected = 2 * friction * h * temperature
            noise_std: float | Tensor = math.sqrt(injected)
            step_size: float | Tensor = h
            variance = evaluation.grad_variance
            if layerwise is not None:
                seen = layerwise.batches_seen(int(state.step[0]))  # all chains have done the same updates
                if seen is not None:
                    return layerwise.observe(state, gradient, seen), diagnose(state.momentum, state, gradient, decay)
                step_size = h * layerwise.scale(state.mass)
                variance = None if variance is None else variance / state.mass
            if self.correct_gradient_noise:
                noise_std, state = remaining_std(
                    state, variance, problem, name=self.name, injected=injected, squared_step=h**2
                )
            momentum = decay * state.momentum - step_size * gradient + noise_std * randn(rngs, state.theta)
            moved = state._replace(theta=state.theta + step_size * momentum, momentum=momentum, step=state.step + 1)
            ratio = noise_ratio(variance, problem, injected=injected, squared_step=h**2)
            return moved, diagnose(momentum, state, gradient, decay) | ratio

        def diagnose(momentum: Tensor, state: Any, gradient: Tensor, decay: float) -> Info:
            kinetic = momentum.square().mean(1)
            return {
                "kinetic_temperature": kinetic,
                # the limit h^2 lambda -> 0 of E m^2; under a schedule m follows it within 1 / (1 - decay^2) updates
                "kinetic_temperature_law": torch.full_like(kinetic, 2 * temperature / (1 + decay)),
                "configurational_temperature": (state.theta * gradient).mean(1),  # eq. 43; T in the mean, eq. 44
            }

        return Rule(init, locate_at_theta, update, lambda state, draws: Draws.from_chains(draws))
