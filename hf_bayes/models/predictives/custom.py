"""Posterior predictive distributions under a user's likelihood (``uncertainty.custom``).

Numbers have standard deviations, by the law of total variance, with mean f_m and variance v_m of member m:

    predictive^2 = aleatoric^2 + epistemic^2,   aleatoric^2 = mean_m v_m,   epistemic^2 = Var_m f_m.

Classes have entropies in nats, as the classes of transformers' heads do.
"""

from __future__ import annotations

import functools
from typing import cast

from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.predictives import built_in
from hf_bayes.models.predictives.built_in import MemberClasses, MemberPredictive, number_statistics
from hf_bayes.models.predictors import Predictive
from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import Moments
from hf_bayes.uncertainty.custom.bradley_terry import Preferences
from hf_bayes.uncertainty.custom.weighted import WeightedRows
from hf_bayes.uncertainty.decomposition import Prediction
from hf_bayes.uncertainty.gaussian_links import NUM_DRAWS, moments, monte_carlo
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood, widened
from hf_bayes.uncertainty.several_labels import two_classes


class OwnNumbers(MemberPredictive):
    """The mean of the mixture of members [..., D], and the standard deviations around it."""

    def __init__(self, logits: Tensor, likelihood: Adapted, group: LocalMembers) -> None:
        super().__init__(logits, likelihood, group)
        means, variances = cast(Moments, likelihood.config.predict(widened(logits)))
        self.logits = group.mean(means)
        aleatoric = group.mean(variances)
        epistemic = group.mean((means - self.logits).square())
        self.parts = {
            "predictive_std": (aleatoric + epistemic).sqrt(),
            "aleatoric_std": aleatoric.sqrt(),
            "epistemic_std": epistemic.sqrt(),
        }

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL, squared errors, deviations, and the share of labels within one predictive deviation."""
        return super().statistics(labels) | number_statistics(self.logits, self.parts, labels)


class MemberRewards(MemberPredictive):
    """The members' mean reward [..., 1] of single texts, and its standard deviation over the members."""

    def __init__(self, logits: Tensor, likelihood: Likelihood, group: LocalMembers) -> None:
        super().__init__(logits, likelihood, group)
        rewards = widened(logits)
        self.logits = group.mean(rewards)
        self.parts = {"epistemic_std": group.mean((rewards - self.logits).square()).sqrt()}


class GaussianRewards:
    """The mean reward [..., 1] of single texts, and its standard deviation, from Gaussian rewards.

    Rewards of single texts have no labels, so that nothing is scored.
    """

    members: tuple[Prediction, Tensor] | None = None

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        self.logits, variance = moments(mean, covariance)
        self.parts = {"epistemic_std": variance.sqrt()}

    def loss(self, labels: Tensor) -> Tensor:
        raise AssertionError("labels of single texts are refused before")

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        raise AssertionError("labels of single texts are refused before")

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        raise AssertionError("labels of single texts are refused before")


class DrawnOutputs:
    """A prediction from draws of Gaussian outputs, which are no members of a posterior."""

    members: tuple[Prediction, Tensor] | None = None

    def __init__(self, inner: Predictive) -> None:
        self._inner, self.logits, self.parts = inner, inner.logits, inner.parts

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the labels."""
        return self._inner.loss(labels)

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the statistics of the labels, without those of single members."""
        found = self._inner.statistics(labels)
        return {name: value for name, value in found.items() if not name.startswith("member_")}

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Return [n, G, 3], see ``mixture_temperature``."""
        return self._inner.nll_at_temperatures(labels)


class UnweightedRows:
    """A prediction that is judged without the weights of rows: each held-out row counts once."""

    def __init__(self, inner: Predictive, likelihood: WeightedRows) -> None:
        self._inner, self._likelihood = inner, likelihood
        self.logits, self.parts = inner.logits, inner.parts
        self.members: tuple[Prediction, Tensor] | None = inner.members

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the labels, without their weights."""
        return self._inner.loss(self._likelihood.parts(labels)[0])

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the statistics of the labels, without their weights."""
        return self._inner.statistics(self._likelihood.parts(labels)[0])

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Return [n, G, 3], see ``mixture_temperature``, without weights."""
        return self._inner.nll_at_temperatures(self._likelihood.parts(labels)[0])


def of_members(logits: Tensor, likelihood: Likelihood, group: LocalMembers, temperature: float = 1.0) -> Predictive:
    """Return the mixture of members with ``logits`` [M, ..., C] under any likelihood.

    Args:
        temperature: as of ``built_in.of_head_members``.
    """
    return _of_members(likelihood, logits, group, temperature)


@functools.singledispatch
def _of_members(likelihood: Likelihood, logits: Tensor, group: LocalMembers, temperature: float) -> Predictive:
    return built_in.of_head_members(logits, likelihood, group, temperature)


@_of_members.register
def _of_weighted(likelihood: WeightedRows, logits: Tensor, group: LocalMembers, temperature: float) -> Predictive:
    return UnweightedRows(of_members(logits, likelihood.inner, group, temperature), likelihood)


@_of_members.register
def _of_texts(likelihood: Preferences, logits: Tensor, group: LocalMembers, temperature: float) -> Predictive:
    if logits.shape[-1] == likelihood.texts_per_row:
        return MemberClasses(logits, Categorical(), group, temperature)
    return MemberRewards(logits, likelihood, group)


@_of_members.register
def _of_own(likelihood: Adapted, logits: Tensor, group: LocalMembers, temperature: float) -> Predictive:
    if likelihood.num_classes is None:
        return OwnNumbers(logits, likelihood, group)
    return MemberClasses(likelihood.predict_classes(logits).log_probs, Categorical(), group, temperature)


def of_gaussian(
    mean: Tensor, covariance: Tensor, likelihood: Likelihood, link: str, temperature: float = 1.0
) -> Predictive:
    """Return the prediction of K Gaussians over the outputs under any likelihood.

    A user's likelihood has no closed form: draws of the outputs, of a fixed seed, are its members. A preference depends
    on the difference of two rewards, in which their common constant cancels.

    Args:
        mean, covariance, link, temperature: as of ``built_in.of_head_gaussian``.
    """
    if isinstance(likelihood, Preferences):
        if mean.shape[-1] != likelihood.texts_per_row:
            return GaussianRewards(mean, covariance)
        return built_in.of_head_gaussian(*_differences(mean, covariance), Categorical(), link, temperature)
    if isinstance(likelihood, WeightedRows):
        return UnweightedRows(of_gaussian(mean, covariance, likelihood.inner, link, temperature), likelihood)
    if not isinstance(likelihood, Adapted):
        return built_in.of_head_gaussian(mean, covariance, likelihood, link, temperature)
    return DrawnOutputs(of_members(_draws(mean, covariance), likelihood, LocalMembers(), temperature))


def _differences(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [..., 2] and the variances [..., 2] of two logits (z, 0), with the difference z = r_0 - r_1.

    Args:
        mean: [..., 2], of r.
        covariance: [..., 2, 2], or its diagonal.
    """
    if covariance.ndim == mean.ndim:
        variance = covariance.sum(-1)
    else:
        variance = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * covariance[..., 0, 1]
    return two_classes(mean[..., 0] - mean[..., 1]).flip(-1), two_classes(variance.clamp_min(0)).flip(-1)


def _draws(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return [S K, ..., C] draws of K Gaussians, of about ``NUM_DRAWS`` in all. All rows share their noise."""
    pairs = -(-NUM_DRAWS // (2 * len(mean)))
    return monte_carlo(mean, covariance, generator(0, "outputs"), 2 * pairs).flatten(0, 1)
