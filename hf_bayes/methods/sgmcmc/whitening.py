"""A stochastic-gradient sampler that chooses its own step size, in coordinates in which all stiff directions are alike.

The chain stands at theta_0, the end of its warm start. Three things happen there, once:

1. A pass over the data gives H, the curvature of -log p(D | theta). With tau the prior's precision and S a root of the
   posterior's covariance, S S' = (H + tau)^-1, the sampler moves v of theta = theta_0 + S v. In v the energy U has a
   curvature of about 1 in every direction. S does not change any more, so exp(-U / T) stays the target.
2. Some minibatches give V, the variance of an element of S' grad U over minibatches. It is the mean over the
   directions where the data outweigh the prior (H > tau). theta does not move meanwhile. Each minibatch is evaluated at
   theta_0 and at a draw of the Laplace approximation. This decides where the chain starts, and if its gradients have a
   control variate (``laplace_trial``).
3. The step size follows from the heating that is allowed. A gradient of variance V adds h^2 V / (2 (1 - beta)) to T
   (``sghmc``), hence

       h^2 = 2 heating T (1 - beta) / V          at most ``MAX_STEP``^2

A model is no Gaussian: where the chain goes, curvature and noise may be larger than at theta_0. Its steps then become
smaller (``step_control``).

A direction of curvature 1 forgets its past in (1 - beta) / h^2 updates, the *relaxation* of the chain. The updates
after burn-in, divided by the relaxation, are the independent draws that a run has time for.

V and h are a chain's own, so a chain does not depend on the others. Any sampler with one gradient per update fits in.
It runs at the fixed step size ``MAX_STEP`` on v' = v ``MAX_STEP`` / h, that is, with the root S h / ``MAX_STEP``. This
equals steps of size h in v, and lets each chain have an h of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.joined_states import inner_state, joined_state
from hf_bayes.core.rng import randn, spare_generators
from hf_bayes.core.types import DataPasses, Evaluation, Info, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.laplace.prior_precision import precision_of, temper
from hf_bayes.methods.laplace.supported import CurvatureSpec, default_structure, drawn_or_empirical
from hf_bayes.methods.sgmcmc import laplace_trial, step_control
from hf_bayes.methods.sgmcmc.covariance_roots import ROOTS, Roots, informed_by_data
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig
from hf_bayes.methods.sgmcmc.laplace_trial import Choice, Trial
from hf_bayes.methods.sgmcmc.step_control import PathNoise, relaxation_of

MAX_STEP = 0.2
"""The largest h. In a direction of curvature 1 the discretisation then adds h^2 / (2 (1 + beta)) = 1 % to the variance
(beta = .9, ``sghmc``)."""

MAX_MEASURED = 24
"""The largest number of minibatches that V is measured from, at two points each. They give 12 pairs. In a single
direction the standard error of V would be sqrt(2 / 12) = 40 %; V is a mean over all directions where the data
outweigh the prior."""

INFORMED_PERIOD = 8
"""Updates between two measurements of the temperature where the data outweigh the prior."""

MAX_BASIS = 2**22
"""The largest number of elements in the bases of eigenvectors, for a chain: 16 MiB."""

PASS_SHARE = 0.05
"""The share of a run's gradients that the curvature pass may take; it sees as many random rows as that allows."""


class Whitening(NamedTuple):
    """The fields that whitening adds to a sampler's state."""

    root: Tensor
    """[M, P] S, packed (``covariance_roots``); zeros that take no memory before the curvature pass."""
    step_size: Tensor
    """[M] h; ``MAX_STEP`` before it is known."""
    origin: Tensor
    """[M, d] theta_0."""
    direction: Tensor
    """[M, d] sqrt(T) v of the draw theta_0 + sqrt(T) S v; [M, 1] zeros after the choice."""
    all_rows: Tensor
    """[M, d] grad log p(D | theta_0) on all rows, for the control variate; zero without it."""
    choices: Tensor
    """[M, 7] a ``laplace_trial.Choice``; zero before the choice."""
    trial_previous: Tensor
    trial_squares: Tensor
    trial_slope: Tensor
    trial_num_taken: Tensor
    """A ``laplace_trial.Trial``; ``trial_num_taken`` is one more after the first update that samples."""
    path_previous: Tensor
    path_num_seen: Tensor
    path_variance: Tensor
    """A ``step_control.PathNoise``; zero before the choice."""


def num_measured(num_steps: int) -> int:
    """Return the number of minibatches that V is measured from: a fiftieth of the run, 4 to ``MAX_MEASURED``."""
    return max(4, min(MAX_MEASURED, num_steps // 50 // 2 * 2))


def whiten(config: LangevinConfig, problem: Problem, build: Callable[[Problem], Any]) -> Rule[Any]:
    """Return a sampler in whitened coordinates, with a step size of its own.

    The learning rate of an update is a factor of h^2, 1 at the peak of a schedule.

    Args:
        config: the sampler's settings.
        problem: the run, after its warm start.
        build: (problem) -> the rule of the sampler itself.
    Raises:
        ValueError: if burn-in is too short to measure V in it, or the rest of the run is shorter than the shortest
            relaxation.
    """
    measured = num_measured(problem.num_steps)
    if problem.burn_in <= measured:
        raise ValueError(
            f"{config.name} finds its step size from {measured} minibatches in its burn-in, which has "
            f"{problem.burn_in} updates after the warm start: train longer, raise burn_in, or give learning_rate"
        )
    _require_relaxation(config, problem)
    sampler = build(problem._replace(prior=FlatPrior(), learning_rate=problem.num_data * MAX_STEP**2))
    whitened = WhitenedSampler(config, problem, sampler, measured, *_roots(config, problem))

    def finish(state: Any, draws: Tensor) -> Any:
        return sampler.finish(inner_state(state), draws)

    return Rule(
        init=whitened.init, locate=locate_at_theta, update=whitened.update, finish=finish,
        early_passes={0: whitened.find_root, measured: whitened.choose},
        anchor=whitened.anchor, rescale=whitened.rescale, restart=whitened.restart,
        estimates=lambda state: int(state.trial_num_taken[0]) < measured,
    )  # fmt: skip


def _require_relaxation(config: LangevinConfig, problem: Problem) -> None:
    """Raise a ValueError if the updates after burn-in are fewer than a relaxation at the largest step size."""
    least, left = relaxation_of(config, MAX_STEP), problem.num_steps - problem.burn_in
    if left < least:
        raise ValueError(
            f"{config.name}: a chain forgets its past in {least:.3g} updates at best, and the {left} updates after "
            f"burn-in pay {left / least:.2g} of that: its draws would be copies of where AdamW ended. Train until at "
            f"least {math.ceil(least)} updates follow burn-in, or take method='ensemble'"
        )


@dataclass(frozen=True)
class WhitenedSampler:
    """A sampler of one run, in whitened coordinates.

    Attributes:
        config, problem: see ``whiten``.
        sampler: the sampler of v, at step size ``MAX_STEP`` and without a prior.
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
        rows, number = len(theta), theta.new_zeros(len(theta), 1)
        zeros = number.expand_as(theta)  # what is not known yet has its shape, and takes no memory
        direction = randn(rngs, theta).mul_(math.sqrt(self.config.temperature))
        numbers = theta.new_full((rows,), MAX_STEP), theta, direction, zeros, theta.new_zeros(rows, 7)
        path = step_control.begin(theta.new_zeros(rows), 1)._replace(previous=zeros)
        own = Whitening(number.expand(rows, self.roots.size), *numbers, *laplace_trial.begin(theta), *path)
        inner = self.sampler.init(zeros, spare_generators(rngs))  # a new one is made when the sampler starts
        blank = {name: zeros for name, value in inner._asdict().items() if value.shape == zeros.shape}
        return _joined(theta, own, inner._replace(**blank))

    def find_root(self, state: Any, passes: DataPasses) -> Any:
        """Return the state with S of every chain."""
        packed = []
        for theta in state.theta:
            curvature = passes.curvature(theta, self.spec, gradient=False).curvature
            precision = precision_of(self.problem.prior, curvature.diagonal)
            packed.append(self.roots.pack(temper(curvature, precision, temperature=1.0, what="posterior")))
        return state._replace(root=torch.stack(packed).to(state.theta))

    def anchor(self, state: Any) -> Tensor | None:
        """Return where the next update needs the gradient, too: at the draw on trial, or at the control variate."""
        if int(state.trial_num_taken[0]) < self.num_measured:  # all chains have done the same number of updates
            return self._draw(state)
        origin: Tensor = state.origin
        return origin if bool(_choice(state).anchored.any()) else None

    def choose(self, state: Any, passes: DataPasses) -> Any:
        """Return the state at the start that the trial has chosen, with the step size."""
        cost = laplace_trial.cost_of_anchor(self.problem.num_steps - self.num_measured, self.problem.update_fraction)
        found = laplace_trial.choose(_part(Trial, state, "trial_"), self._allowed / MAX_STEP**2, cost)
        all_rows = passes.full_gradient(state.origin) if bool(found.anchored.any()) else None
        if all_rows is None:
            found = laplace_trial.without_anchor(found)
        return state._replace(
            theta=torch.where(found.fits[:, None], self._draw(state), state.origin),
            step_size=(self._allowed / found.variance).sqrt(),
            all_rows=state.all_rows if all_rows is None else torch.where(found.anchored[:, None], all_rows, 0.0),
            choices=torch.stack([part.to(state.theta) for part in found], 1),
            direction=torch.zeros_like(state.direction[:, :1]),
            path_variance=found.variance.to(state.theta),
        )

    def rescale(self, state: Any, ratio: float) -> Any:
        """Return the state of the same chains at ``ratio`` times the temperature: in v, a Gaussian around theta_0."""
        factor = math.sqrt(ratio)
        there = replace(self.config, temperature=round(ratio * self.config.temperature, 12))  # rounded: T = 1 is exact
        own = _with_path(_part(Whitening, state), step_control.moved(_part(PathNoise, state, "path_")))
        step_size = math.sqrt(_allowed_of(there) / self._allowed) * state.step_size
        own = own._replace(step_size=step_size.clamp_max(MAX_STEP))
        theta = state.origin + factor * (state.theta - state.origin)
        return _joined(theta, own, self.sampler.rescale(inner_state(state), ratio))

    def restart(self, state: Any, chains: Tensor) -> Any:
        """Return the state with some chains at theta_0, and the step size for the noise that was measured there."""
        variance = _choice(state).variance.to(state.theta)
        return state._replace(
            theta=torch.where(chains[:, None], state.origin, state.theta),
            step_size=torch.where(chains, (self._allowed / variance).sqrt().clamp_max(MAX_STEP), state.step_size),
            path_num_seen=torch.where(chains, 0, state.path_num_seen),
            path_variance=torch.where(chains, variance, state.path_variance),
        )

    def update(self, state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        """Return the state after an update that measures, or after one of the sampler."""
        count = int(state.trial_num_taken[0])  # all chains have done the same number of updates
        if count < self.num_measured:
            return self._measure(state, evaluation, rngs), {}
        weight, prior = self.config.prior_weight, self.problem.prior
        gradient = self._whitened(state, state.theta, self._corrected(state, evaluation))
        informed = functools.partial(informed_by_data, self.roots, state.root, prior)
        axes = functools.partial(self.roots.along_axes, state.root)
        # measured before the sampler makes tensors: the two need their memory one after the other
        path = step_control.take(_part(PathNoise, state, "path_"), gradient, axes, informed())
        scale, peak = (state.step_size / MAX_STEP)[:, None], self.problem.num_data * MAX_STEP**2
        log_density = evaluation.log_lik + (weight * prior.log_prob(state.theta)).to(evaluation.log_lik)
        before = inner_state(state)
        after, info = self.sampler.update(before, Evaluation(log_density, scale * gradient), lr * peak, rngs)
        if hasattr(after, "momentum") and int(after.step[0]) % INFORMED_PERIOD == 0:  # the same for all chains
            info = info | {"kinetic_temperature_informed": _mean_square(axes(after.momentum), informed())}
        step_size = step_control.step_for_noise(state.step_size, path, self._allowed)
        law = info.get("kinetic_temperature_law")
        if law is not None and hasattr(after, "momentum"):
            step_size, after = step_control.cooled(step_size, before, after, law)
        own = _with_path(_part(Whitening, state)._replace(step_size=step_size), path)
        theta = state.theta + self.roots.product(state.root, scale * (after.theta - before.theta))
        growth = own.path_variance / _choice(state).variance
        info |= {"step_size": step_size, "relaxation": relaxation_of(self.config, step_size), "noise_growth": growth}
        if count == self.num_measured:
            own, info = own._replace(trial_num_taken=state.trial_num_taken + 1), info | self._trial_figures(state)
        return _joined(theta, own, after), info

    def _measure(self, state: Any, evaluation: Evaluation, rngs: Rngs) -> Any:
        """Take one more minibatch into the trial; after the last one start the sampler."""
        state = self._tried(state, evaluation)
        if int(state.trial_num_taken[0]) < self.num_measured:
            return state
        return _joined(state.theta, _part(Whitening, state), self.sampler.init(torch.zeros_like(state.theta), rngs))

    def _tried(self, state: Any, evaluation: Evaluation) -> Any:
        """Return the state with one more minibatch in its trial."""
        at_start, at_draw = evaluation.grad_log_lik, evaluation.anchor_grad
        assert at_start is not None
        assert at_draw is not None
        axes = functools.partial(self.roots.along_axes, state.root)
        beside = axes(self._whitened(state, self._draw(state), at_draw)).neg_()  # in place: it is a new tensor
        gradients = axes(self._whitened(state, state.theta, at_start)).neg_(), beside
        informed = informed_by_data(self.roots, state.root, self.problem.prior)
        trial = laplace_trial.take(_part(Trial, state, "trial_"), gradients, axes(state.direction), informed)
        return state._replace(**{f"trial_{name}": value for name, value in trial._asdict().items()})

    def _draw(self, state: Any) -> Tensor:
        """Return the draw of the Laplace approximation, theta_0 + sqrt(T) S v."""
        draw: Tensor = state.origin + self.roots.product(state.root, state.direction)
        return draw

    @property
    def _allowed(self) -> float:
        """h^2 V of the heating that is allowed."""
        return _allowed_of(self.config)

    def _whitened(self, state: Any, theta: Tensor, grad_log_lik: Tensor) -> Tensor:
        """Return minus S' grad U at theta, from the gradient of the log-likelihood."""
        gradient = self.problem.prior.grad(theta)
        gradient = self.config.prior_weight * gradient  # one name for all three, so that the earlier tensors are freed
        gradient = grad_log_lik + gradient
        return self.roots.transposed(state.root, gradient)

    def _corrected(self, state: Any, evaluation: Evaluation) -> Tensor:
        """Return the gradient of the log-likelihood, of some chains with a control variate."""
        gradient, beside = evaluation.grad_log_lik, evaluation.anchor_grad
        assert gradient is not None
        if beside is None:
            return gradient
        return torch.where(_choice(state).anchored[:, None], gradient - beside + state.all_rows, gradient)

    def _trial_figures(self, state: Any) -> Info:
        """Return what the trial has found, and what follows, for messages."""
        found = _choice(state)
        named = {f"trial_{name}": value.to(state.theta) for name, value in found._asdict().items()}
        return named | {"gradient_variance": found.variance}


def _roots(config: LangevinConfig, problem: Problem) -> tuple[Roots, CurvatureSpec]:
    """Return how S is held, and the curvature it is made of."""
    shapes = tuple(problem.shapes.values())
    structure = config.whitening or default_structure(shapes, MAX_BASIS)
    if structure == "full" and (dim := sum(map(math.prod, shapes))) ** 2 > MAX_BASIS:
        raise ValueError(
            f"{config.name}: whitening='full' holds a matrix of {dim} x {dim} for each chain; the limit is "
            f"{math.isqrt(MAX_BASIS)}: leave it out, or choose a smaller subspace"
        )
    roots = ROOTS[structure](shapes)
    share = 1.0 if problem.update_fraction is None else PASS_SHARE * problem.num_steps * problem.update_fraction
    estimator = drawn_or_empirical(problem.likelihood.lacks)
    return roots, CurvatureSpec(estimator=estimator, structure=structure, share=min(1.0, share))


def _allowed_of(config: LangevinConfig) -> float:
    """Return h^2 V of the heating that is allowed."""
    friction = 1 - float(getattr(config, "momentum", 0.0))
    return 2 * config.allowed_heating * config.temperature * friction


def _joined(theta: Tensor, own: Whitening, inner: Any) -> Any:
    return joined_state({"theta": theta, **own._asdict()}, inner, prefix="whitened_")


def _part(kind: Any, state: Any, prefix: str = "") -> Any:
    return kind(*(getattr(state, f"{prefix}{field}") for field in kind._fields))


def _mean_square(values: Tensor, informed: Tensor) -> Tensor:
    """Return [M] the mean of the squares of values [M, d] where the data outweigh the prior, where minibatches heat."""
    return values.square().masked_fill_(~informed, 0.0).sum(1) / informed.sum(1)


def _with_path(own: Whitening, path: PathNoise) -> Whitening:
    return own._replace(**{f"path_{name}": value for name, value in path._asdict().items()})


def _choice(state: Any) -> Choice:
    fits, anchored, *numbers = state.choices.unbind(1)
    return Choice(fits > 0, anchored > 0, *numbers)
