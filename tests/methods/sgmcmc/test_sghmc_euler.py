from __future__ import annotations

import math

import torch

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig


def test_it_matches_sghmc_of_the_posteriors_package() -> None:
    epsilon, alpha, sigma, num_data = 0.3, 0.4, 1.2, 7
    temperature = 0.5 / num_data  # theirs; T = N times that
    scale = math.sqrt(num_data) / sigma  # our momentum over theirs
    rate = (epsilon / sigma) ** 2
    config = SGHMCEulerConfig(momentum=1 - epsilon * alpha / sigma**2, temperature=num_data * temperature)
    rule = config.build(Problem(num_data, FlatPrior(), rate, num_steps=1, burn_in=0, shapes={"": (5,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.randn(1, 5, generator=generator("theta"), dtype=torch.float64), [generator("m")])
    theta, m = state.theta[0], state.momentum[0] / scale
    rngs, noise = [generator("noise")], generator("noise")
    for _ in range(10):
        state, _ = rule.update(state, Evaluation(torch.zeros(1), -num_data * state.theta.sin()), rate, rngs)
        zeta = torch.randn(5, generator=noise, dtype=torch.float64)
        theta, m = (
            theta + epsilon / sigma**2 * m,
            m
            - epsilon * theta.sin()
            - epsilon / sigma**2 * alpha * m
            + math.sqrt(2 * epsilon * temperature * alpha) * zeta,
        )
        assert (state.theta[0] - theta).abs().max() < 1e-12
        assert (state.momentum[0] - scale * m).abs().max() < 1e-12


def test_zero_temperature_is_sgd_with_a_gradient_one_update_late() -> None:
    rate, beta = 0.05, 0.9
    rule = SGHMCEulerConfig(temperature=0.0, momentum=beta).build(Problem(1, FlatPrior(), rate, 1, 0, {"": (3,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.randn(1, 3, generator=generator("theta"), dtype=torch.float64), [generator(0)])
    weights = state.theta[0].clone().requires_grad_()
    sgd = torch.optim.SGD([weights], lr=rate, momentum=beta)
    before = torch.zeros(3, dtype=torch.float64)
    for _ in range(50):
        weights.grad, before = before, weights.detach().sin()
        sgd.step()
        state, _ = rule.update(state, Evaluation(torch.zeros(1), -state.theta.sin()), rate, [generator(0)])
        assert (state.theta[0] - weights.detach()).abs().max() < 1e-12
