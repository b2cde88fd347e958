from __future__ import annotations

import pytest
import torch

from hf_bayes.core.likelihood_facts import LikelihoodFacts
from hf_bayes.core.types import Problem
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior
from hf_bayes.methods.laplace.fit_checks import check_fits

POSTERIOR = Gaussian.diagonal(torch.zeros(1, 2), torch.ones(1, 2))


def problem(prior: FlatPrior | GaussianPrior | Gaussian, noise_std: float | None = 1.0) -> Problem:
    return Problem(1.0, prior, 0.1, 1, 0, {"w": (2,)}, likelihood=LikelihoodFacts(noise_std=noise_std))


@pytest.mark.parametrize(
    ("given", "fit_prior", "fit_noise", "message"),
    [
        (problem(FlatPrior()), "evidence", False, "laplace: fit_prior='evidence' needs a prior apart from the energy"),
        (problem(FlatPrior(), None), None, True, "laplace: fit_noise=True is for regressions"),
        (problem(POSTERIOR), "evidence", False, "laplace: fit_prior='evidence' would replace the posterior"),
        (problem(POSTERIOR), None, True, "fit_noise=True and a posterior as the prior do not go together"),
    ],
)
def test_a_fit_that_the_problem_rules_out_is_refused(
    given: Problem, fit_prior: str | None, fit_noise: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_fits(given, "laplace", fit_prior=fit_prior, fit_noise=fit_noise)


def test_a_fit_that_the_problem_allows_passes() -> None:
    check_fits(problem(POSTERIOR, None), "laplace", fit_prior=None, fit_noise=False)
    check_fits(problem(FlatPrior()), "laplace", fit_prior=None, fit_noise=True)
    check_fits(problem(GaussianPrior(torch.zeros(2), torch.ones(2))), "laplace", fit_prior="evidence", fit_noise=True)
