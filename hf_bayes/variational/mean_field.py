"""Mean-field variational inference by reparametrisation (Kingma & Welling 2014; Blundell et al. 2015).

    q = N(mean, diag std^2),   F(q) = E_q[U] - T H[q],   theta = mean + std eps,   eps ~ N(0, I)

    dF/dmean    = E[grad U(theta)]
    dF/dlog std = E[grad U(theta) eps] std - T

minimised by Adam with one eps per chain and update. ``temper="likelihood"`` makes U the sum U_lik + T U_prior and so F
E_q[U_lik] + T KL(q || prior). Optimum: for a Gaussian posterior with covariance S at T = 1, its mean and the precision
diag(S^-1) / T.

Three things make one draw enough. The entropy is exact. The part of grad U(theta) linear in eps, slope * eps, is learnt
coordinate by coordinate (least mean squares) and its expectation put in its place. As slope depends on past draws
only, both gradients stay unbiased; the noise of a Gaussian prior vanishes with it, as if its part were in closed form,
and on a diagonal Gaussian posterior all noise does. Last, q averages the iterates after burn-in, or of the second half
of the run if that is shorter (Polyak & Juditsky 1992): what noise is left falls as 1 / sqrt(updates).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.blocks import in_blocks
from hf_bayes.config import MethodConfig
from hf_bayes.energy import energy, grad_energy
from hf_bayes.posterior import Gaussian
from hf_bayes.rng import randn
from hf_bayes.types import Evaluation, Info, Problem, Rngs, Rule

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's."""

SLOPE_RATE = 0.05
"""Of the least mean squares: a memory of 20 updates. Where grad U does not depend on eps at all it adds 3 % to the
variance of the gradient in mean and 5 % in log std: rate / (2 - 3 rate) and twice that."""


class MeanFieldState(NamedTuple):
    """q, Adam's state and the draw that ``update`` will be given the gradient at.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        log_std: [M, d] log std of q (averaged).
        iterate: [M, 2, d] the last mean and log std.
        first, second: [M, 2, d] Adam's moments.
        slope: [M, d] regression of grad U(mean + std eps) on eps.
        noise: [M, d] eps of the current draw.
        step: [M] int64, updates done.
    """

    theta: Tensor
    log_std: Tensor
    iterate: Tensor
    first: Tensor
    second: Tensor
    slope: Tensor
    noise: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class MeanFieldConfig(MethodConfig):
    """Mean-field Gaussian variational inference: ends in one Gaussian per chain, ``draws_per_chain`` is not used.

    Attributes:
        init_std: standard deviation of q at the start, in parameter units.
        std_learning_rate: Adam's step size for log std, a relative change per update; it follows the schedule of
            the learning rate, which Adam uses for the mean and which is in parameter units.
    """

    name: ClassVar[str] = "mean_field"
    num_chains: int = 1
    init_std: float = 0.01
    std_learning_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError(
                f"{self.name}: temperature must be > 0, got {self.temperature}: at T = 0 the std of q is 0 and its "
                'mean the MAP. Use method="map"'
            )
        self._check_number("init_std", self.init_std, minimum=0.0, strict=True)
        self._check_number("std_learning_rate", self.std_learning_rate, minimum=0.0, strict=True)

    def build(self, problem: Problem) -> Rule:
        first_averaged = max(problem.burn_in, problem.num_steps // 2)

        def init(theta: Tensor, rngs: Rngs) -> MeanFieldState:
            log_std = torch.full_like(theta, math.log(self.init_std))
            iterate = torch.stack([theta, log_std], 1)
            zero, zeros = torch.zeros_like(theta), torch.zeros_like(iterate)
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return MeanFieldState(theta, log_std, iterate, zeros, zeros, zero, zero, steps)

        def locate(state: MeanFieldState, rngs: Rngs) -> tuple[Tensor, MeanFieldState]:
            state = state._replace(noise=randn(rngs, state.theta))
            return _draw(state), state

        def update(state: MeanFieldState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MeanFieldState, Info]:
            drawn = _draw(state)
            gradient = grad_energy(evaluation, drawn, problem.prior, prior_weight=self.prior_weight)
            rates = gradient.new_tensor([lr, self.std_learning_rate * lr / problem.learning_rate])[:, None]
            weight = 1 / (state.step + 1 - first_averaged).clamp(min=1).to(gradient.dtype)[:, None]

            def advance(
                gradient: Tensor, theta: Tensor, log_std: Tensor, iterate: Tensor, *rest: Tensor
            ) -> tuple[Tensor, ...]:
                first, second, slope, noise = rest
                residual = torch.addcmul(gradient, slope, noise, value=-1)
                correlated = residual * noise
                slope_gradient = (correlated + slope) * iterate[:, 1].exp()
                # units that keep Adam's epsilon small beside every gradient: per datum as in a HF loss, and in kT
                gradients = torch.stack([residual / problem.num_data, slope_gradient / self.temperature - 1], 1)
                direction, first, second = adam(gradients, first, second, state.step + 1)
                iterate = iterate - rates * direction
                theta = torch.lerp(theta, iterate[:, 0], weight)
                log_std = torch.lerp(log_std, iterate[:, 1], weight)
                return theta, log_std, iterate, first, second, slope + SLOPE_RATE * correlated

            theta, log_std, iterate, first, second, slope = in_blocks(advance, gradient, *state[:-1])
            new = MeanFieldState(theta, log_std, iterate, first, second, slope, state.noise, state.step + 1)
            drawn_energy = energy(evaluation, drawn, problem.prior, prior_weight=self.prior_weight)
            entropy = state.iterate[:, 1].sum(1) + 0.5 * theta.shape[1] * (1 + math.log(2 * math.pi))
            return new, {"free_energy": drawn_energy - self.temperature * entropy, "std": log_std.mean(1).exp()}

        def finish(state: MeanFieldState, draws: Tensor) -> Gaussian:
            return Gaussian.diagonal(state.theta, state.log_std.exp())

        return Rule(init, locate, update, finish)


def _draw(state: MeanFieldState) -> Tensor:
    """[M, d]: theta = mean + std eps at the last iterate."""
    (drawn,) = in_blocks(lambda at, noise: (at[:, 0] + at[:, 1].exp() * noise,), state.iterate, state.noise)
    return drawn


def adam(gradient: Tensor, first: Tensor, second: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Direction of Adam's update number ``step`` [M] (Kingma & Ba 2015, alg. 1) and the two moments after it."""
    first = torch.lerp(first, gradient, 1 - BETA1)
    second = torch.lerp(second, gradient.square(), 1 - BETA2)
    t = step.to(gradient.dtype)[:, None, None]
    direction = (first / (1 - BETA1**t)) / ((second / (1 - BETA2**t)).sqrt() + EPSILON)
    return direction, first, second
