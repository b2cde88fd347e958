"""A stochastic-gradient sampler that chooses its own step size, in coordinates in which all stiff directions are alike.

The chain stands at theta_0, the end of its warm start. Three things happen there, once:

1. A pass over the data gives H, the curvature of -log p(D | theta). With tau the prior's precision and S a root of the
   posterior's covariance, S S' = (H + tau)^-1, the sampler moves v of theta = theta_0 + S v. In v the energy U has a
   curvature of about 1 in every direction. S does not change any more, so exp(-U / T) stays the target.
2. Some minibatches at theta_0 give V, the variance of an element of S' grad U over minibatches. It is the mean over the
   directions that the data rule, where H > tau. theta does not move meanwhile.
3. The step size follows from the heating that is allowed. A gradient of variance V adds h^2 V / (2 (1 - beta)) to T
   (``sghmc``), hence

       h^2 = 2 heating T (1 - beta) / V          at most ``MAX_STEP``^2

A model is no Gaussian: where the chain goes, directions may be stiffer than at theta_0 (the curvature of LoRA's A grows
with B), and the momenta then heat. An update that finds the kinetic temperature of a chain above ``MAX_HEAT`` times its
law scales momenta and move back to that law, and every ``PATIENCE``-th update that does so shrinks h by ``SHRINKAGE``.
A chain in equilibrium is six standard deviations away from that, so its target does not change.

A direction of curvature 1 forgets its past in (1 - beta) / h^2 updates, the *relaxation* of the chain. The updates
after burn-in, divided by the relaxation, are the independent draws that a run can buy.

V and h are a chain's own, so a chain does not depend on the others. Any sampler with one gradient per update fits in:
it sees v, the gradient S' grad U, and the step size ``MAX_STEP``; S is scaled by h / ``MAX_STEP``, which is the same.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import spare_generators
from hf_bayes.core.types import DataPass, Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.laplace.prior_precision import precision_of, temper
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.methods.sgmcmc.covariance_roots import DiagonalRoots, KroneckerRoots, Roots
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig

MAX_STEP = 0.2
"""The largest h. In a direction of curvature 1 the discretisation then adds h^2 / (2 (1 + beta)) = 1 % to the variance
(beta = .9, ``sghmc``)."""

MAX_HEAT = 1.5
"""The kinetic temperature over its law above which a step is too large. The mean over d momenta has a relative standard
deviation of sqrt(2 / d). Six of these exceed 50 % below 288 parameters, and the mark is higher there."""

SHRINKAGE = 0.8
"""The factor of h after an update that was too hot."""

PATIENCE = 10
"""Updates between two changes of h: energy that a step too large has stored in theta takes as long to drain, at
beta = .9."""

MAX_MEASURED = 24
"""The largest number of minibatches that V is measured from. They give 12 pairs; in a single direction the standard
error of V would be sqrt(2 / 12) = 40 %, and V is a mean over all directions that the data rule."""

MAX_BASIS = 2**22
"""The largest number of elements in the bases of Kronecker factors, for a chain: 16 MiB."""

PASS_SHARE = 0.05
"""The share of a run's gradients that the curvature pass may take; it sees as many random rows as that allows."""


class Whitening(NamedTuple):
    """The fields that whitening adds to a sampler's state."""

    root: Tensor
    """[M, P] S, packed (``covariance_roots``); zero before the curvature pass."""
    step_size: Tensor
    """[M] h; ``MAX_STEP`` before it is known."""
    previous: Tensor
    """[M, d] S' grad U of the last minibatch while V is measured, then zero."""
    squares: Tensor
    """[M] the sum over pairs of minibatches that V is measured from."""
    measured: Tensor
    """[M] int64, minibatches that V was measured from so far."""


def num_measured(num_steps: int) -> int:
    """Return the number of minibatches that V is measured from: a twenty-fifth of the run, 4 to ``MAX_MEASURED``."""
    return max(4, min(MAX_MEASURED, num_steps // 25 // 2 * 2))


def whiten(config: LangevinConfig, problem: Problem, build: Callable[[Problem], Any]) -> Rule[Any]:
    """Return a sampler in whitened coordinates, with a step size of its own.

    The learning rate of an update is a factor of h^2, 1 at the peak of a schedule.

    Args:
        config: of the sampler.
        problem: the run, after its warm start.
        build: (problem) -> the rule of the sampler itself.
    Raises:
        ValueError: if burn-in is too short to measure V in it.
    """
    measured = num_measured(problem.num_steps)
    if problem.burn_in <= measured:
        raise ValueError(
            f"{config.name} finds its step size from {measured} minibatches in its burn-in, which has "
            f"{problem.burn_in} updates after the warm start: train longer, raise burn_in, or give learning_rate"
        )
    sampler = build(problem._replace(prior=FlatPrior(), learning_rate=problem.num_data * MAX_STEP**2))
    whitened = WhitenedSampler(config, problem, sampler, measured, *_roots(config, problem))

    def finish(state: Any, draws: Tensor) -> Any:
        return sampler.finish(_inner(state), draws)

    return Rule(whitened.init, locate_at_theta, whitened.update, finish, None, whitened.early_pass, 0)


@dataclass(frozen=True)
class WhitenedSampler:
    """A sampler of one run, in whitened coordinates.

    Attributes:
        config, problem: see ``whiten``.
        sampler: of v, at step size ``MAX_STEP`` and without a prior.
        num_measured: minibatches that V is measured from.
        roots: the structure of S.
        spec: the curvature that S is made of.
    """

    config: LangevinConfig
    problem: Problem
    sampler: Rule[Any]
    num_measured: int
    roots: Roots
    spec: CurvatureSpec

    def init(self, theta: Tensor, rngs: Rngs) -> Any:
        """Return the state before the curvature pass."""
        rows, zeros = len(theta), torch.zeros_like(theta)
        count = torch.zeros(rows, dtype=torch.int64, device=theta.device)
        numbers = theta.new_full((rows,), MAX_STEP), zeros, theta.new_zeros(rows), count
        own = Whitening(theta.new_zeros(rows, self.roots.size), *numbers)
        return _joined(theta, own, self.sampler.init(zeros, spare_generators(rngs)))

    def early_pass(self, state: Any, data_pass: DataPass) -> Any:
        """Return the state with S of every chain."""
        packed = []
        for theta in state.theta:
            curvature = data_pass(theta, self.spec, gradient=False).curvature
            precision = precision_of(self.problem.prior, curvature.diagonal)
            packed.append(self.roots.pack(temper(curvature, precision, temperature=1.0, what="posterior")))
        return state._replace(root=torch.stack(packed).to(state.theta))

    def update(self, state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        """Return the state after an update that measures, or after one of the sampler."""
        assert evaluation.grad_log_lik is not None
        prior, weight = self.problem.prior, self.config.prior_weight
        gradient = self.roots.transposed(state.root, evaluation.grad_log_lik + weight * prior.grad(state.theta))
        if int(state.measured[0]) < self.num_measured:  # all chains have done the same number of updates
            return self._measure(state, gradient, rngs)
        scale, peak = (state.step_size / MAX_STEP)[:, None], self.problem.num_data * MAX_STEP**2
        log_density = evaluation.log_lik + (weight * prior.log_prob(state.theta)).to(evaluation.log_lik)
        before = _inner(state)
        after, info = self.sampler.update(before, Evaluation(log_density, scale * gradient), lr * peak, rngs)
        own, after = _cooled(_own(state), before, after, info)
        theta = state.theta + self.roots.product(state.root, scale * (after.theta - before.theta))
        return _joined(theta, own, after), info | {"step_size": own.step_size}

    def _measure(self, state: Any, gradient: Tensor, rngs: Rngs) -> tuple[Any, Info]:
        """Take one more minibatch into V; after the last one choose h and start the sampler."""
        config, count, squares = self.config, state.measured + 1, state.squares
        if int(count[0]) % 2 == 0:
            pair = self.roots.along_axes(state.root, gradient - state.previous).square() / 2
            squares = squares + _mean_of_data(self.roots, state.root, self.problem, pair)
        if int(count[0]) < self.num_measured:
            own = Whitening(state.root, state.step_size, gradient, squares, count)
            return _joined(state.theta, own, _inner(state)), {}
        variance = squares / (self.num_measured // 2)
        friction = 1 - float(getattr(config, "momentum", 0.0))
        step_size = (2 * config.heating * config.temperature * friction / variance).sqrt().clamp_max(MAX_STEP)
        own = Whitening(state.root, step_size, torch.zeros_like(gradient), squares, count)
        relaxation = friction / step_size.square()
        info = {"gradient_variance": variance, "step_size": step_size, "relaxation": relaxation}
        return _joined(state.theta, own, self.sampler.init(torch.zeros_like(state.theta), rngs)), info


def _cooled(own: Whitening, before: Any, state: Any, info: Info) -> tuple[Whitening, Any]:
    """Return the fields and the sampler's state of an update, with a smaller move for the chains that are too hot."""
    law = info.get("kinetic_temperature_law")
    if law is None or not hasattr(state, "momentum"):
        return own, state
    heat = state.momentum.square().mean(1) / law
    is_hot = heat > max(MAX_HEAT, 1 + 6 * math.sqrt(2 / state.momentum.shape[1]))
    if not bool(is_hot.any()):
        return own, state
    cooling = torch.where(is_hot, heat.rsqrt(), 1.0)[:, None]
    factor = SHRINKAGE if int(state.step[0]) % PATIENCE == 0 else 1.0  # all chains have done the same updates
    step_size = torch.where(is_hot, factor * own.step_size, own.step_size)
    moved = before.theta + cooling * (state.theta - before.theta)
    return own._replace(step_size=step_size), state._replace(theta=moved, momentum=cooling * state.momentum)


def _roots(config: LangevinConfig, problem: Problem) -> tuple[Roots, CurvatureSpec]:
    """Return how S is held, and the curvature it is made of."""
    shapes = tuple(problem.shapes.values())
    kronecker = KroneckerRoots(shapes)
    has_matrices = any(len(shape) == 2 for shape in shapes)
    structure = config.whitening or ("kronecker" if has_matrices and kronecker.size <= MAX_BASIS else "diagonal")
    roots = kronecker if structure == "kronecker" else DiagonalRoots(shapes)
    share = 1.0 if problem.update_fraction is None else PASS_SHARE * problem.num_steps * problem.update_fraction
    return roots, CurvatureSpec(structure=structure, share=min(1.0, share))


def _mean_of_data(roots: Roots, packed: Tensor, problem: Problem, values: Tensor) -> Tensor:
    """Return the mean [M] of ``values`` [M, d] over the directions in which H > tau: S S' < half the prior's variance.

    It is the mean over all directions where there are none.
    """
    variance = precision_of(problem.prior, values[0]).variance
    ruled = roots.variances(packed) < roots.of_prior(variance) / 2
    ruled |= ~ruled.any(1, keepdim=True)
    return (values * ruled).sum(1) / ruled.sum(1)


@functools.cache
def _state_type(inner: Any) -> Any:
    """Return the flat state type of a whitened sampler whose own state is the NamedTuple ``inner``."""
    own = [f"whitened_{field}" for field in inner._fields]
    flat = namedtuple("WhitenedState", ["theta", *Whitening._fields, *own])  # type: ignore[misc]
    return type("WhitenedState", (flat,), {"__slots__": (), "inner": inner})


def _joined(theta: Tensor, own: Whitening, inner: Any) -> Any:
    fields = {f"whitened_{name}": value for name, value in inner._asdict().items()}
    kind: Any = type(inner)
    return _state_type(kind)(theta=theta, **own._asdict(), **fields)


def _own(state: Any) -> Whitening:
    return Whitening(*(getattr(state, field) for field in Whitening._fields))


def _inner(state: Any) -> Any:
    kind = type(state).inner
    return kind(**{field: getattr(state, f"whitened_{field}") for field in kind._fields})
