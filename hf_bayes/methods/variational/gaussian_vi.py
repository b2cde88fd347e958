"""The settings and estimators that Gaussian variational methods share.

    q = N(mean, S),   F(q) = E_q[U] - T H[q],   theta = mean + delta,   delta ~ N(0, S)

An update has the gradient of U at k draws on the same rows: one draw, or k / 2 antithetic pairs mean + delta and
mean - delta. The estimates are means over the draws, and the entropy counts once. The even part of a pair, half the sum
of its gradients, estimates E[grad U]. The odd part, half the difference, holds the curvature that sets S. A minibatch
adds the same error to both gradients of a pair, so the odd part does not have it. With one draw it does: the variance
of an estimate of the curvature is then about (rows of the data / rows of the update) times its square, which is what
makes fitted standard deviations inaccurate. An odd k > 1 would bring this noise back by its draw without a mirror
image: three draws would give less accurate standard deviations than two. It is refused.

The P = k / 2 pairs are an axis of the noise, [M, P, n]; one draw has P = 1. Draw number i of an update belongs to pair
i // 2. Even numbers are at mean + delta, and odd numbers at mean - delta.

``linear``, the best linear guess of grad U from delta, is subtracted in every estimator, as its expectation is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import Evaluation, Prior, Problem
from hf_bayes.distributions.energy import by_column
from hf_bayes.methods.variational.optimisers import OptimiserName
from hf_bayes.methods.variational.points import check_expression


@dataclass(frozen=True, kw_only=True)
class ReparametrisedVIConfig(MethodConfig):
    """The fields of methods that minimise F by an optimiser, in the mean, log standard deviations and factors of q.

    A chain ends in one Gaussian; ``draws_per_chain`` is not used. The default of ``num_draws`` is 2: an update costs
    two gradients. At an equal number of gradients the standard deviations are then more than twice as accurate as with
    one (docs/variational.md).

    Attributes:
        init_std: standard deviation of q at the start, in parameter units.
        num_draws: k, the gradients of an update: 1 or an even number, for k / 2 antithetic pairs of draws on the same
            rows. An update costs k gradients, and the number of updates stays as given. From 2 on, minibatch noise does
            not enter the standard deviations of q; more pairs lower the noise of the draws.
        std_learning_rate: the optimiser's step size for log standard deviations, with AdamW a relative change per
            update. It follows the schedule of the learning rate, which is the step size for the mean.
        optimizer: "adamw", which finds its learning rate if there is none; or "sgd".
        momentum: AdamW's beta_1, or SGD's beta.
        estimator: "learned_slope" learns the linear part of the gradient; "stick_the_landing" takes it from q. The
            second is noisy as long as q is much narrower than the posterior: choose an ``init_std`` near its width.
        points: regular expression on names of random parameters that are learnt as points, with a variance of 0. Their
            prior is a penalty, as in a MAP estimate. None means that all parameters are random.
    """

    num_chains: int = 1
    init_std: float = 0.01
    num_draws: int = 2
    std_learning_rate: float = 0.01
    optimizer: OptimiserName = "adamw"
    momentum: float = 0.9
    estimator: Literal["learned_slope", "stick_the_landing"] = "learned_slope"
    points: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_zero_temperature(self.name, self.temperature)
        self._check_number("init_std", self.init_std, minimum=0.0, strict=True)
        self._check_count("num_draws", self.num_draws, minimum=1)
        refuse_unpaired_draw(self.name, self.num_draws)
        self._check_number("std_learning_rate", self.std_learning_rate, minimum=0.0, strict=True)
        self._check_choice("optimizer", self.optimizer, ("adamw", "sgd"))
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_choice("estimator", self.estimator, ("learned_slope", "stick_the_landing"))
        check_expression(self.name, self.points)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            learning_rate="range_test" if self.optimizer == "adamw" else "given",
            draws_are_chain_states=False,
            gradients_per_update=self.num_draws,
        )


def refuse_zero_temperature(method: str, temperature: float) -> None:
    """Raise a ValueError at T = 0."""
    if temperature == 0:
        raise ValueError(
            f"{method}: temperature must be > 0, got {temperature}: at T = 0 the std of q is 0 and its mean the MAP. "
            'Use method="map"'
        )


def refuse_unpaired_draw(method: str, num_draws: int) -> None:
    """Raise a ValueError if one of several draws has no mirror image."""
    if num_draws > 1 and num_draws % 2:
        raise ValueError(
            f"{method}: num_draws must be 1 (one draw) or even (antithetic pairs), got {num_draws}: a draw outside a "
            "pair would bring minibatch noise into the standard deviations of q. Use "
            f"{num_draws - 1} or {num_draws + 1}"
        )


Point = Callable[[int, int], Tensor]
"""(pair, sign) -> mean + sign delta, all of theta or some columns of it."""


def averaging_weight(problem: Problem, count: int) -> float:
    """Return the weight of iterate number ``count`` (from 1) in the average of the iterates so far.

    The average begins after burn-in, or in the middle of the run if that is later. Before, it is the last iterate.
    """
    return 1 / max(1, count - max(problem.burn_in, problem.num_steps // 2))


def draw_pairs(draw: Callable[[], Tensor], num_draws: int) -> Tensor:
    """Return the noise [M, P, n] of an update from ``draw``, which returns new noise [M, n] at each call."""
    return torch.stack([draw() for _ in range(max(1, num_draws // 2))], 1)


def place(number: int) -> tuple[int, int]:
    """Return the pair of draw ``number`` of an update, and the sign of its noise."""
    return number // 2, -1 if number % 2 else 1


def other_points(point: Point, num_draws: int) -> Tensor | None:
    """Return the points [M, k - 1, d] of all draws but the first; None if there are no others."""
    if num_draws == 1:
        return None
    return torch.stack([point(*place(number)) for number in range(1, num_draws)], 1)


def gradients_of(evaluation: Evaluation, num_draws: int) -> tuple[Tensor, ...]:
    """Return the gradient of log p(D | theta) [M, d] at each draw of an update."""
    assert evaluation.grad_log_lik is not None
    others = () if evaluation.anchor_grad is None else evaluation.anchor_grad.unbind(1)
    # without this, an update of pairs from their first gradient alone would be silent, and have all the minibatch noise
    assert len(others) == num_draws - 1, f"an update takes {num_draws} gradients, got {1 + len(others)} (Rule.anchor)"
    return evaluation.grad_log_lik, *others


class EnergyGradient(NamedTuple):
    """The gradient of U in a form that serves for work on a few columns of theta at a time (``column_blocks``).

    Attributes:
        tensors: tensors [..., d], which are cut into the same columns as theta.
        log_prior: the part of log p(theta) that ``at`` does not return; a number, or [M].
        at: (columns of theta, columns of the tensors) -> (their part of log p, the gradient of U [M, w]).
    """

    tensors: tuple[Tensor, ...]
    log_prior: float | Tensor
    at: Callable[..., tuple[float | Tensor, Tensor]]

    @classmethod
    def of(cls, grad_log_lik: Tensor, prior: Prior, theta: Callable[[], Tensor], *, weight: float) -> EnergyGradient:
        """Return the gradient of U_lik + weight U_prior at ``theta()`` [M, d]."""
        columns = by_column(prior, theta)

        def at(theta: Tensor, grad_log_lik: Tensor, *parameters: Tensor) -> tuple[float | Tensor, Tensor]:
            log_prior, grad_log_prior = columns.of(theta, *parameters)
            return log_prior, torch.add(grad_log_lik, grad_log_prior, alpha=weight).neg_()

        return cls((grad_log_lik, *columns.parameters), columns.log_prob, at)


class GradientsOfDraws(NamedTuple):
    """The gradients of U at all draws of an update, in a form that serves for work on a few columns at a time.

    Attributes:
        sources: one for each draw.
    """

    sources: tuple[EnergyGradient, ...]

    @classmethod
    def of(
        cls, evaluation: Evaluation, prior: Prior, point: Point, *, num_draws: int, weight: float
    ) -> GradientsOfDraws:
        """Return the gradients of U_lik + weight U_prior at the draws of ``evaluation``."""
        return cls(
            tuple(
                EnergyGradient.of(grad_log_lik, prior, partial(point, *place(number)), weight=weight)
                for number, grad_log_lik in enumerate(gradients_of(evaluation, num_draws))
            )
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors [..., d] of all draws, which are cut into the same columns as theta."""
        return tuple(tensor for source in self.sources for tensor in source.tensors)

    def at(self, point: Point, tensors: Sequence[Tensor]) -> tuple[float | Tensor, list[Tensor]]:
        """Return the part of log p at the first draw, and the gradients [M, w] of all draws, in these columns."""
        size = len(tensors) // len(self.sources)
        found = [
            source.at(point(*place(number)), *tensors[number * size : (number + 1) * size])
            for number, source in enumerate(self.sources)
        ]
        return found[0][0], [gradient for _, gradient in found]


def parts(gradients: Sequence[Tensor], linear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean even part [M, w] and the odd parts [M, P, w] of grad U without its linear part.

    Args:
        gradients: grad U [M, w] at each draw. With one draw both parts are the same.
        linear: the guess [M, P, w] of grad U that is linear in delta.
    """
    if len(gradients) == 1:
        remainder = gradients[0][:, None] - linear
        return remainder[:, 0], remainder
    gradient, beside = torch.stack(tuple(gradients[::2]), 1), torch.stack(tuple(gradients[1::2]), 1)
    return over_pairs(0.5 * (gradient + beside)), torch.sub(gradient, beside).mul_(0.5).sub_(linear)


def over_pairs(values: Tensor) -> Tensor:
    """Return the mean [M, ...] over the pairs of values [M, P, ...]."""
    return values[:, 0] if values.shape[1] == 1 else values.mean(1)


def gaussian_entropy(sum_of_log_stds: Tensor, dim: int) -> Tensor:
    """Return the entropy [M] of Gaussians over ``dim`` elements from half the log determinants of their covariances."""
    return sum_of_log_stds + 0.5 * dim * (1 + math.log(2 * math.pi))
