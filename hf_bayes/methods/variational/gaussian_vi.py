"""The settings and estimators that Gaussian variational methods share.

    q = N(mean, S),   F(q) = E_q[U] - T H[q],   theta = mean + delta,   delta ~ N(0, S)

An update has the gradient of U at one draw, or at an antithetic pair mean + delta and mean - delta on the same rows.
The even part of a pair, half the sum of its gradients, estimates E[grad U]. The odd part, half the difference, holds
the curvature that sets S. A minibatch adds the same error to both gradients of a pair, so the odd part does not have
it. With one draw it does: the variance of an estimate of the curvature is then about (rows of the data / rows of the
update) times its square, which is what makes fitted standard deviations inaccurate.

``linear``, the best linear guess of grad U from delta, is subtracted in every estimator, as its expectation is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import Prior, Problem
from hf_bayes.distributions.energy import by_column
from hf_bayes.methods.variational.optimisers import OptimiserName
from hf_bayes.methods.variational.points import check_expression


@dataclass(frozen=True, kw_only=True)
class GaussianVIConfig(MethodConfig):
    """The fields of all Gaussian variational methods. A chain ends in one Gaussian; ``draws_per_chain`` is not used.

    Attributes:
        init_std: standard deviation of q at the start, in parameter units.
        num_draws: gradients of an update, 1 or 2. Two are taken at an antithetic pair of draws on the same rows. An
            update then costs twice as much, and minibatch noise no longer enters the standard deviations of q.
    """

    num_chains: int = 1
    init_std: float = 0.01
    num_draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError(
                f"{self.name}: temperature must be > 0, got {self.temperature}: at T = 0 the std of q is 0 and its "
                'mean the MAP. Use method="map"'
            )
        self._check_number("init_std", self.init_std, minimum=0.0, strict=True)
        if self.num_draws not in (1, 2):
            raise ValueError(
                f"{self.name}: num_draws must be 1 (one draw) or 2 (an antithetic pair), got {self.num_draws!r}: for "
                "less noise, use more rows in an update"
            )

    @property
    def requirements(self) -> Requirements:
        return Requirements(learning_rate="range_test", draws_are_chain_states=False)


@dataclass(frozen=True, kw_only=True)
class ReparametrisedVIConfig(GaussianVIConfig):
    """The fields of methods that minimise F by an optimiser, in the mean, log standard deviations and factors of q.

    Attributes:
        std_learning_rate: the optimiser's step size for log standard deviations, with AdamW a relative change per
            update. It follows the schedule of the learning rate, which is the step size for the mean.
        optimizer: "adamw", which finds its learning rate if there is none; or "sgd".
        momentum: AdamW's beta_1, or SGD's beta.
        estimator: "learned_slope" learns the linear part of the gradient; "stick_the_landing" takes it from q. The
            second is noisy as long as q is much narrower than the posterior: choose an ``init_std`` near its width.
        points: regular expression on names of random parameters that are learnt as points, with a variance of 0. Their
            prior is a penalty, as in a MAP estimate. None means that all parameters are random.
    """

    std_learning_rate: float = 0.01
    optimizer: OptimiserName = "adamw"
    momentum: float = 0.9
    estimator: Literal["learned_slope", "stick_the_landing"] = "learned_slope"
    points: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("std_learning_rate", self.std_learning_rate, minimum=0.0, strict=True)
        self._check_choice("optimizer", self.optimizer, ("adamw", "sgd"))
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_choice("estimator", self.estimator, ("learned_slope", "stick_the_landing"))
        check_expression(self.name, self.points)

    @property
    def requirements(self) -> Requirements:
        found = super().requirements
        return found if self.optimizer == "adamw" else replace(found, learning_rate="given")


def averaging_weight(problem: Problem, count: int) -> float:
    """Return the weight of iterate number ``count`` (from 1) in the average of the iterates so far.

    The average begins after burn-in, or in the middle of the run if that is later. Before, it is the last iterate.
    """
    return 1 / max(1, count - max(problem.burn_in, problem.num_steps // 2))


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


def parts(gradient: Tensor, beside: Tensor | None, linear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd part of grad U without its linear part.

    Args:
        gradient: grad U at mean + delta.
        beside: grad U at mean - delta; None with one draw. Both parts are then the same tensor.
        linear: the guess of grad U that is linear in delta.
    """
    if beside is None:
        remainder = gradient - linear
        return remainder, remainder
    return 0.5 * (gradient + beside), torch.sub(gradient, beside).mul_(0.5).sub_(linear)


def gaussian_entropy(sum_of_log_stds: Tensor, dim: int) -> Tensor:
    """Return the entropy [M] of Gaussians over ``dim`` elements from half the log determinants of their covariances."""
    return sum_of_log_stds + 0.5 * dim * (1 + math.log(2 * math.pi))
