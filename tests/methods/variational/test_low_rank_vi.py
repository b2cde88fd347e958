from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Problem
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
from tests.methods.variational.logistic import Regression, errors, fit
from tests.methods.variational.test_full_rank_vi import covariance_error
from tests.runs import trainer


@pytest.mark.slow
@pytest.mark.statistics
def test_rank_d_equals_full() -> None:
    full = FullRankVIConfig(init_std=0.5, optimizer="sgd", std_learning_rate=0.005)
    low = LowRankVIConfig(init_std=0.5, optimizer="sgd", std_learning_rate=0.01, rank=5)
    # both equal the same closed form: the noise vanishes at the optimum, so SGD converges geometrically
    assert covariance_error(full, num_steps=4000, learning_rate=0.02) < 5e-7
    assert covariance_error(low, num_steps=5000, learning_rate=0.03) < 5e-7


@pytest.mark.slow
@pytest.mark.statistics
@pytest.mark.parametrize("prior_std", [1.0, 10.0])
def test_a_logistic_regression_ends_near_the_full_optimum(prior_std: float) -> None:
    target = Regression.with_prior(prior_std)
    best, gap = target.optimum(full=True), target.optimum().free_energy
    for rank, batch in ((6, None), (6, 32)):
        config = LowRankVIConfig(rank=rank, num_draws=1 if batch is None else 2)
        found = errors(target, fit(target, config, num_steps=6000, learning_rate=0.01, batch=batch), best)
        assert found.free_energy < 0.02  # the requirements, as in the next line
        assert found.std < 0.02
    lower = errors(target, fit(target, LowRankVIConfig(rank=1), num_steps=4000, learning_rate=0.01), best)
    assert 0.02 < lower.free_energy < gap - best.free_energy  # the twin: rank 1 is better than a diagonal only


def test_the_trainer_ends_in_a_low_rank_gaussian(tmp_path: Path) -> None:
    made = trainer(tmp_path, LowRankVIConfig(rank=2), max_steps=12, learning_rate=0.01)
    made.train()
    q = made.posterior.approximation
    assert isinstance(q, Gaussian)
    assert q.kind == "gaussian_low_rank"
    assert q.sample(3, generator("members")).isfinite().all()


def test_a_rank_above_d_is_refused() -> None:
    problem = Problem(1, FlatPrior(), 0.1, 10, 5, {"": (5,)})
    with pytest.raises(ValueError, match="rank must be at most the number of random parameters, 5, got 6: lower it"):
        LowRankVIConfig(rank=6).build(problem)
    with pytest.raises(ValueError, match="rank must be an integer >= 1, got 0"):
        LowRankVIConfig(rank=0)
