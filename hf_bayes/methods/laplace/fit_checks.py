"""The check that a problem has the prior and the noise that a Laplace approximation is to fit."""

from __future__ import annotations

from hf_bayes.core.types import Problem
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import FlatPrior


def check_fits(problem: Problem, name: str, *, fit_prior: str | None, fit_noise: bool) -> None:
    """Refuse to fit a prior or a noise that ``problem`` does not have, or that a posterior as the prior determines.

    Args:
        problem: the data, likelihood and prior.
        name: the method's, for errors.
        fit_prior: the score that the prior precision maximises, if it is fitted.
        fit_noise: whether the noise of a regression is fitted.
    """
    if fit_prior is not None and isinstance(problem.prior, FlatPrior):
        raise ValueError(
            f"{name}: fit_prior={fit_prior!r} needs a prior apart from the energy, to replace its "
            "precision: give prior= and leave -log p(theta) out of the energy"
        )
    if fit_noise and problem.likelihood.noise_std is None:
        raise ValueError(f"{name}: fit_noise=True is for regressions: this likelihood has no noise_std. Leave it out")
    if not isinstance(problem.prior, Gaussian):
        return
    if fit_prior is not None:
        raise ValueError(f"{name}: fit_prior={fit_prior!r} would replace the posterior that is the prior: leave it out")
    if fit_noise:
        raise ValueError(
            f"{name}: fit_noise=True and a posterior as the prior do not go together: that posterior was "
            "computed with the noise of its own data. Give noise_std, or leave prior= out"
        )
