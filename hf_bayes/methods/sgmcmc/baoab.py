"""BAOAB and BAOA: splittings of Langevin dynamics (Leimkuhler and Matthews 2013), one gradient per update.

    h_t = sqrt(l_t / N)                        as in sghmc; l_0 the peak of the schedule
    c_t = exp(-gamma h_t)                      gamma = -log(beta) / h_0 fixed: beta at the peak
    B  m <- m_{t-1} - h_t grad U(theta_{t-1})
    A  theta <- theta_{t-1} + h_t m / 2
    O  m_t = c_t m + sqrt((1 - c_t^2) T) R_t
    A  theta_t = theta + h_t m_t / 2

Between two updates of BAOAB, two half kicks B use the same gradient, so they are done as one kick. After the first
update BAOAB and BAOA (posteriors' name) are therefore the same chain of positions. They differ in the place at which
the momentum is read. BAOAB reads it between the half kicks, where m is independent of theta, so a run that starts at
m_0 ~ N(0, T) begins with half a kick. BAOA reads it after O and begins with a whole kick. In both, the state holds m_t
after O.

Stationary law for U = lambda theta^2 / 2, constant l and x = h^2 lambda < 4:

    E theta^2 = T / lambda       exactly        E m^2 = T after O (BAOA),    T (1 - x / 4) between half kicks (BAOAB)

A gradient of U with noise of variance V adds h^2 V (1 + beta) / ((1 - beta) (4 - x)) to T in E theta^2. Weak order 2 in
h. At T = 0 and constant l it is ``torch.optim.SGD(momentum=beta)`` with learning rate l (1 + beta) / 2; beta = 0 is
the limit of high friction.
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


class BAOABState(NamedTuple):
    """Position and momentum."""

    theta: Tensor
    """[M, d]"""
    momentum: Tensor
    """[M, d] after O: unit mass, variance T."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class BAOABConfig(LangevinConfig):
    """Langevin dynamics of weak order 2, whose variance on a Gaussian is exact at any stable learning rate.

    Attributes:
        momentum: beta in [0, 1), the share of the momentum that remains after an update at the peak learning rate.
        scheme: "baoab" starts with half a kick and reports the momentum between half kicks; "baoa" starts with a
            whole kick and reports the momentum after O.
    """

    name: ClassVar[str] = "baoab"
    momentum: float = 0.9
    scheme: Literal["baoab", "baoa"] = "baoab"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_choice("scheme", self.scheme, ("baoab", "baoa"))

    def build(self, problem: Problem) -> Rule[BAOABState]:
        peak, temperature = problem.learning_rate, self.temperature

        def init(theta: Tensor, rngs: Rngs) -> BAOABState:
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return BAOABState(theta, math.sqrt(temperature) * randn(rngs, theta), step)

        def update(state: BAOABState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[BAOABState, Info]:
            h = math.sqrt(lr / problem.num_data)
            decay = self.momentum ** math.sqrt(lr / peak)
            gradient = grad_energy(evaluation, state.theta, problem.prior, prior_weight=self.prior_weight)
            # before the first update of BAOAB there is no earlier update whose half kick remains to be done
            kicked = (state.step > 0).to(gradient)[:, None] if self.scheme == "baoab" else 1.0
            between = state.momentum - h / 2 * kicked * gradient
            momentum = between - h / 2 * gradient
            noise = math.sqrt((1 - decay**2) * temperature) * randn(rngs, state.theta)
            refreshed = decay * momentum + noise
            theta = state.theta + h / 2 * (momentum + refreshed)
            kinetic = (between if self.scheme == "baoab" else refreshed).square().mean(1)
            info = {
                "kinetic_temperature": kinetic,
                "kinetic_temperature_law": torch.full_like(kinetic, temperature),  # x -> 0; exact for baoa
                "configurational_temperature": (state.theta * gradient).mean(1),  # cold_posteriors eq. 43
                **noise_ratio(
                    evaluation.grad_variance, problem, injected=(1 - decay**2) * temperature, squared_step=h**2
                ),
            }
            return BAOABState(theta, refreshed, state.step + 1), info

        return Rule(init, locate_at_theta, update, keep_draws)
