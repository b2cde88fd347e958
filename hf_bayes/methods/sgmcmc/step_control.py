"""Smaller steps where a chain is hotter, or its gradients noisier, than its step size was chosen for (``whitening``).

A step size h is found at theta_0. Where the chain goes, two things may differ.

* *Curvature.* The curvature of LoRA's A grows with B, for example. The momenta then heat. An update that finds the
  kinetic temperature of a chain above ``MAX_HEAT`` times its law scales momenta and move back to that law, and every
  ``PATIENCE``-th update that does so shrinks h by ``SHRINKAGE``.
* *Noise.* Away from a mode some rows are fitted badly, and the gradients of minibatches differ more. They then heat the
  chain where the data outweigh the prior. These directions are too few to show in the mean of all momenta. A chain that
  is heated goes further away, where the noise is larger still. So V is measured along the way as well, from the
  gradients of every two updates. Where it exceeds ``MAX_GROWTH`` times the V of the step size, h is found anew from it.

Both only ever shrink h, and leave alone a chain in equilibrium whose energy is quadratic. So its target does not
change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig

MAX_HEAT = 1.5
"""The kinetic temperature over its law above which a step is too large. The mean over d momenta has a relative standard
deviation of sqrt(2 / d). Six of these exceed 50 % below 288 parameters, and the mark is higher there."""

SHRINKAGE = 0.8
"""The factor of h after an update that was too hot."""

PATIENCE = 10
"""Updates between two changes of h: energy that a step too large has stored in theta takes as long to drain, at
beta = .9."""

MAX_GROWTH = 2.0
"""The largest V along the way over the V of the step size. Heating is then at most twice what was allowed."""

WINDOW = 12
"""Pairs of updates in the mean of V along the way, as many as the largest number of pairs before a chain starts."""


def relaxation_of(config: MethodConfig, step_size: Any) -> Any:
    """Return (1 - beta) / h^2, the updates in which a chain forgets its past, of a step size or a tensor of them."""
    return (1 - float(getattr(config, "momentum", 0.0))) / step_size**2


class PathNoise(NamedTuple):
    """The noise of the gradients along the way of each chain.

    Attributes:
        previous: [M, d] the gradient of U in the last update, in whitened coordinates.
        num_seen: [M] int64, gradients since the chain started or was moved.
        variance: [M] V of a direction where the data outweigh the prior: a mean over about the last ``WINDOW`` pairs.
    """

    previous: Tensor
    num_seen: Tensor
    variance: Tensor


def begin(variance: Tensor, dim: int) -> PathNoise:
    """Return what is known before the first update.

    Args:
        variance: [M] V where the chain starts. It has the weight of ``WINDOW`` pairs.
        dim: d.
    """
    count = torch.zeros(len(variance), dtype=torch.int64, device=variance.device)
    return PathNoise(variance.new_zeros(len(variance), dim), count, variance)


def moved(noise: PathNoise) -> PathNoise:
    """Return it for a chain that was put elsewhere: the next gradient has no partner."""
    return noise._replace(num_seen=torch.zeros_like(noise.num_seen))


def take(noise: PathNoise, gradient: Tensor, along: Callable[[Tensor], Tensor], informed: Tensor) -> PathNoise:
    """Return it after one more update. Within a pair a chain moves by little more than nothing, and noise is new.

    Args:
        gradient: [M, d] of U, in whitened coordinates.
        along: returns vectors [M, d] along the axes of S.
        informed: [M, d] True for axes where the data outweigh the prior.
    """
    count = noise.num_seen + 1
    change = along(gradient - noise.previous)
    squares = torch.where(informed, change.square(), 0.0).sum(1) / (2 * informed.sum(1))
    mean = noise.variance + (squares - noise.variance) / WINDOW
    return PathNoise(gradient, count, torch.where(count % 2 == 0, mean, noise.variance))


def step_for_noise(step_size: Tensor, noise: PathNoise, unit: float) -> Tensor:
    """Return the step sizes [M], smaller where the noise has grown.

    Args:
        unit: h^2 V of the heating that is allowed.
    """
    too_noisy = noise.variance > MAX_GROWTH * unit / step_size.square()
    return torch.where(too_noisy, (unit / noise.variance).sqrt(), step_size)


def cooled(step_size: Tensor, before: Any, state: Any, law: Tensor) -> tuple[Tensor, Any]:
    """Return the step sizes [M] and the state of a sampler after an update, with smaller moves where it is too hot.

    Args:
        before, state: the states of a sampler with momenta, before and after the update.
        law: [M] the kinetic temperature in equilibrium.
    """
    heat = state.momentum.square().mean(1) / law
    is_hot = heat > max(MAX_HEAT, 1 + 6 * math.sqrt(2 / state.momentum.shape[1]))
    if not bool(is_hot.any()):
        return step_size, state
    cooling = torch.where(is_hot, heat.rsqrt(), 1.0)[:, None]
    factor = SHRINKAGE if int(state.step[0]) % PATIENCE == 0 else 1.0  # all chains have done the same updates
    theta = before.theta + cooling * (state.theta - before.theta)
    smaller = torch.where(is_hot, factor * step_size, step_size)
    return smaller, state._replace(theta=theta, momentum=cooling * state.momentum)
