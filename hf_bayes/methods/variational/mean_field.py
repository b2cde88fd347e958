"""Mean-field variational inference by reparametrisation (Kingma & Welling 2014; Blundell et al. 2015).

    q = N(mean, diag std^2),   F(q) = E_q[U] - T H[q],   theta = mean + std eps,   eps ~ N(0, I)

    dF/dmean    = E[grad U(theta)]
    dF/dlog std = E[grad U(theta) eps] std - T

Adam minimises F with one eps per chain and update. With ``temper="likelihood"`` U is U_lik + T U_prior, and so F is
E_q[U_lik] + T KL(q || prior). Optimum: for a Gaussian posterior with covariance S at T = 1, its mean and the precision
diag(S^-1) / T.

Three properties make one draw enough. First, the entropy is exact. Second, the part of grad U(theta) that is linear in
eps, slope * eps, is learned coordinate by coordinate (least mean squares) and replaced by its expectation. As slope
depends only on past draws, both gradients stay unbiased. The noise of a Gaussian prior vanishes in this way, as if its
part were in closed form, and on a diagonal Gaussian posterior all noise vanishes. Third, q averages the iterates after
burn-in, or of the second half of the run if that is shorter (Polyak & Juditsky 1992): the remaining noise falls as
1 / sqrt(updates).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import by_column

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""The constants of Adam."""

SLOPE_RATE = 0.05
"""The rate of the least mean squares, with a memory of 20 updates.

If grad U does not depend on eps at all, it adds 3 % to the variance of the gradient in mean and 5 % in log std:
rate / (2 - 3 rate) and twice that.
"""


class MeanFieldState(NamedTuple):
    """q, the state of Adam, and the draw at which ``update`` receives the gradient.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        log_std: [M, d] log std of q (averaged over iterates).
        iterate: [M, 2, d] the last mean and log std.
        first, second: [M, 2, d] Adam's moments.
        slope: [M, d] regression of grad U(mean + std eps) on eps.
        noise: [M, d] eps of the current draw.
        step: [M] int64, number of updates done.
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
    """Mean-field Gaussian variational inference. A chain ends in one Gaussian; ``draws_per_chain`` is not used.

    Attributes:
        init_std: standard deviation of q at the start, in parameter units.
        std_learning_rate: Adam's step size for log std, a relative change per update. It follows the schedule of the
            learning rate, which is Adam's step size for the mean, in parameter units.
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

    @property
    def requirements(self) -> Requirements:
        return Requirements(learning_rate="range_test", draws_are_chain_states=False)

    def build(self, problem: Problem) -> Rule[MeanFieldState]:
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
            assert evaluation.grad_log_lik is not None
            count = int(state.step[0]) + 1  # all chains have done the same updates
            weight = 1 / max(1, count - first_averaged)
            rates = lr, self.std_learning_rate * lr / problem.learning_rate
            prior = by_column(problem.prior, lambda: _draw(state))
            log_prior, sums_of_log_std = prior.log_prob, torch.zeros_like(state.theta[:, :2])

            def advance(
                grad_log_lik: Tensor, theta: Tensor, log_std: Tensor, iterate: Tensor, *rest: Tensor
            ) -> tuple[Tensor, ...]:
                nonlocal log_prior
                first, second, slope, noise, *parameters = rest
                std = iterate[:, 1].exp()
                part, grad_log_prior = prior.of(torch.addcmul(iterate[:, 0], std, noise), *parameters)
                log_prior = log_prior + part
                # minus (grad U - slope * noise)
                remainder = torch.add(grad_log_lik, grad_log_prior, alpha=self.prior_weight).addcmul_(slope, noise)
                correlated = remainder * noise
                # in these units Adam's epsilon is small beside every gradient: per datum as in a HF loss, and in kT
                gradients = torch.empty_like(iterate)
                torch.mul(remainder, -1 / problem.num_data, out=gradients[:, 0])
                torch.sub(slope, correlated, out=gradients[:, 1])
                gradients[:, 1].mul_(std).div_(self.temperature).sub_(1)
                first, second, denominator = adam(gradients, first, second, count)
                moved = gradients  # the memory is used again
                for half, rate in enumerate(rates):
                    direction = first[:, half], denominator[:, half]
                    torch.addcdiv(iterate[:, half], *direction, value=-rate, out=moved[:, half])
                theta, log_std = torch.lerp(theta, moved[:, 0], weight), torch.lerp(log_std, moved[:, 1], weight)
                sums_of_log_std.add_(torch.stack([iterate[:, 1].sum(1), log_std.sum(1)], 1))
                return theta, log_std, moved, first, second, slope.sub(correlated, alpha=SLOPE_RATE)

            tensors = evaluation.grad_log_lik, *state[:-1], *prior.parameters
            theta, log_std, iterate, first, second, slope = in_blocks(advance, *tensors)
            new = MeanFieldState(theta, log_std, iterate, first, second, slope, state.noise, state.step + 1)
            dim = theta.shape[1]
            entropy = sums_of_log_std[:, 0] + 0.5 * dim * (1 + math.log(2 * math.pi))
            drawn_energy = -evaluation.log_lik - self.prior_weight * log_prior
            std = (sums_of_log_std[:, 1] / dim).exp()
            return new, {"free_energy": drawn_energy - self.temperature * entropy, "std": std}

        def finish(state: MeanFieldState, draws: Tensor) -> Gaussian:
            return Gaussian.diagonal(state.theta, state.log_std.exp())

        return Rule(init, locate, update, finish)


def _draw(state: MeanFieldState) -> Tensor:
    """Return theta = mean + std eps [M, d] at the last iterate."""

    def draw(iterate: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return (torch.addcmul(iterate[:, 0], iterate[:, 1].exp(), noise),)

    return in_blocks(draw, state.iterate, state.noise)[0]


def adam(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return Adam's two moments after update number ``step`` (Kingma & Ba 2015, alg. 1).

    The third tensor is the divisor of the first moment in Adam's direction.
    """
    first = torch.lerp(first, gradient, 1 - BETA1)
    second = (BETA2 * second).addcmul_(gradient, gradient, value=1 - BETA2)
    of_first, of_second = 1 - BETA1**step, 1 - BETA2**step
    return first, second, second.sqrt().mul_(of_first / math.sqrt(of_second)).add_(of_first * EPSILON)
