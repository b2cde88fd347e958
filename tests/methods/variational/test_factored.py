from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.variational.factored import FactoredState
from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
from hf_bayes.methods.variational.gaussian_vi import ReparametrisedVIConfig
from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
from tests.methods.by_hand import evaluated

DIM, DRAWS, TEMPERATURE = 3, 30_000, 0.7
CURVATURE = torch.tensor([[2.0, 0.8, 0.0], [0.8, 1.0, -0.3], [0.0, -0.3, 4.0]], dtype=torch.float64)
PRIOR = GaussianPrior(torch.tensor(0.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
both = pytest.mark.parametrize("kind", [LowRankVIConfig, FullRankVIConfig])


def built(kind: type[ReparametrisedVIConfig], **fields: object) -> Rule[FactoredState]:
    rank = {"rank": 2} if kind is LowRankVIConfig else {}
    config = kind(temperature=TEMPERATURE, **rank, **fields)  # type: ignore[arg-type]
    rule = config.build(Problem(1, PRIOR, 1.0, 9, 0, {"": (DIM,)}))
    assert isinstance(rule, Rule)
    return rule


def placed(rule: Rule[FactoredState]) -> FactoredState:
    """Return a state of many chains that share one q with correlations."""
    state = rule.init(torch.zeros(DRAWS, DIM, dtype=torch.float64), Many())
    row = torch.randn(state.iterate.shape[1:], generator=generator("q"), dtype=torch.float64) * 0.5
    row[2:] = row[2:].triu(1) if len(row) == DIM + 2 else row[2:]
    slope = torch.tensor([[0.4, 1.0]], dtype=torch.float64).expand(DRAWS, 2)
    return state._replace(iterate=row.expand_as(state.iterate).clone(), slope=slope)


def quadratic(theta: Tensor) -> Evaluation:
    return Evaluation(torch.zeros(len(theta)), -theta @ CURVATURE)


class Many(list):  # type: ignore[type-arg]
    """The generators of many chains; one generator draws for all."""

    def __init__(self) -> None:
        super().__init__([generator("draws", 0)] * DRAWS)


def free_energy(iterate: Tensor, low_rank: bool) -> Tensor:
    """Return F of one q [2 + r, d] for a quadratic energy, in closed form."""
    mean, scale, factors = iterate[0], iterate[1].exp(), iterate[2:]
    eye = torch.eye(DIM, dtype=torch.float64)
    inner = eye + factors.T @ factors if low_rank else (eye + factors.T) @ (eye + factors)
    covariance = scale[:, None] * inner * scale
    hessian = CURVATURE + eye / 4
    energy = 0.5 * (mean @ hessian @ mean + (hessian * covariance).sum())
    return energy - 0.5 * TEMPERATURE * torch.logdet(covariance)


@both
@pytest.mark.statistics
@pytest.mark.parametrize("estimator", ["learned_slope", "stick_the_landing"])
def test_gradients_are_those_of_the_free_energy(kind: type[ReparametrisedVIConfig], estimator: str) -> None:
    rule = built(kind, estimator=estimator, optimizer="sgd", momentum=0.0)
    state = placed(rule)
    leaf = state.iterate[0].clone().requires_grad_()
    (exact,) = torch.autograd.grad(free_energy(leaf, kind is LowRankVIConfig), leaf)
    exact[1:] /= TEMPERATURE  # in units of kT
    exact[2:] = exact[2:].triu(1) if kind is FullRankVIConfig else exact[2:]
    theta, state = rule.locate(state, Many())
    new, _ = rule.update(state, evaluated(rule, state, theta, quadratic), 1.0, Many())
    error, standard_error = new.first.mean(0) - exact, new.first.std(0) / DRAWS**0.5
    assert (error.abs() <= 4.5 * standard_error + 1e-12).all()  # of 15 numbers
    wrong = exact + torch.tensor([0.0, 0.1, *[0.0] * (len(exact) - 2)])[:, None]  # the twin: 10 % less entropy
    assert ((new.first.mean(0) - wrong).abs() > 4.5 * standard_error).any()


@both
def test_at_the_optimum_of_a_gaussian_one_draw_has_no_noise(kind: type[ReparametrisedVIConfig]) -> None:
    rank = {"rank": DIM} if kind is LowRankVIConfig else {}
    config = kind(estimator="stick_the_landing", optimizer="sgd", num_draws=1, **rank)  # type: ignore[arg-type]
    rule = config.build(Problem(1, PRIOR, 1.0, 9, 0, {"": (DIM,)}))
    state = rule.init(torch.zeros(1, DIM, dtype=torch.float64), [generator(0)])
    covariance = (CURVATURE + torch.eye(DIM, dtype=torch.float64) / 4).inverse()
    if kind is LowRankVIConfig:
        scale = covariance.diagonal().sqrt() / 3
        values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None] - torch.eye(DIM))
        factors = values.sqrt()[:, None] * vectors.T
    else:
        root = torch.linalg.cholesky(covariance)
        scale = root.diagonal()
        factors = (root / scale[:, None]).T.triu(1)
    iterate = torch.cat([torch.zeros(1, DIM), scale.log()[None], factors])[None]
    theta, state = rule.locate(state._replace(iterate=iterate), [generator(1)])
    new, _ = rule.update(state, quadratic(theta), 1.0, [])
    assert new.first.abs().max() < 1e-13
    assert theta.abs().max() > 0.1
