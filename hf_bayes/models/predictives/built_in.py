"""Posterior predictive distributions of classes, of several labels and of numbers.

Each is made from the logits of members, or from Gaussian outputs N(mean, covariance) of a linearised model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.metrics import per_row_statistics
from hf_bayes.models.predictors import Predictive
from hf_bayes.uncertainty.decomposition import Prediction
from hf_bayes.uncertainty.gaussian_links import LINKS, GaussianPrediction, log_density, moments
from hf_bayes.uncertainty.likelihoods import IGNORE, Categorical, Likelihood, Normal, widened
from hf_bayes.uncertainty.mixture_temperature import (
    nll_at_temperatures,
    temper,
    temper_log_probs,
    temper_uncertainties,
)
from hf_bayes.uncertainty.several_labels import Bernoulli, summed, two_classes


class Deviations(NamedTuple):
    """Standard deviations of a regression's prediction, in units of the labels.

    Attributes:
        predictive_std: standard deviation of the label, sqrt(noise_std^2 + Var_m f_m) (law of total variance).
        epistemic_std: standard deviation of the members' means, sqrt(Var_m f_m).
    """

    predictive_std: Tensor
    epistemic_std: Tensor


class ClassPredictive:
    """A distribution of one class for each term.

    Args:
        log_probs: [..., C].
        parts: name -> [...] uncertainties.
        temperature: the temperature of the mixture that both are at.
    """

    members: tuple[Prediction, Tensor] | None = None

    def __init__(self, log_probs: Tensor, parts: dict[str, Tensor], likelihood: Likelihood, temperature: float) -> None:
        self.logits, self.parts, self.likelihood, self.temperature = log_probs, parts, likelihood, temperature

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean over terms of -log q(label)."""
        terms = self.likelihood.is_term(labels)
        return -self.likelihood.log_prob(self.logits[None, terms], labels[None, terms]).sum() / terms.sum().clamp_min(1)

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return scores of the mixture, and uncertainties."""
        terms = labels != IGNORE
        uncertainties = {name: value[terms] for name, value in self.parts.items()}
        return {**per_row_statistics(self.logits[terms], labels[terms]), **uncertainties}

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Return [n, G, 3], see ``mixture_temperature``."""
        _require_untempered(self.temperature)
        terms = labels != IGNORE
        return nll_at_temperatures(self.logits[terms], labels[terms])


class LabelPredictive:
    """Probabilities of several labels, each present or absent.

    The labels of an input count as independent: the NLL of a row is the sum over its labels of -log q(label), as its
    uncertainties are sums over labels. A temperature of the mixture applies to each label.

    Args:
        log_probs: [..., C, 2] of "absent" and "present".
        parts: name -> [..., C] uncertainties of each label.
        temperature: the temperature that the prediction shall have.
    """

    members: tuple[Prediction, Tensor] | None = None

    def __init__(self, log_probs: Tensor, parts: dict[str, Tensor], likelihood: Likelihood, temperature: float) -> None:
        if temperature != 1:
            log_probs = temper_log_probs(log_probs, temperature)
            parts = temper_uncertainties(log_probs, parts["total"], parts)
        no, yes = log_probs.unbind(-1)
        self.log_probs, self.logits, self.parts = log_probs, yes - no, summed(parts)
        self.likelihood, self.temperature = likelihood, temperature

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean over rows of the NLL of all labels."""
        nll = self._nll(labels)
        return nll.sum() / max(1, nll.numel())

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL of all labels of each row, and uncertainties."""
        return {"nll": self._nll(labels), **self.parts}

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Return [n, G, 3], see ``mixture_temperature``; sums over the labels of a row."""
        _require_untempered(self.temperature)
        flat = self.log_probs.flatten(0, -2)
        share = labels.to(torch.float64).flatten()[:, None, None]
        absent, present = (nll_at_temperatures(flat, torch.full_like(flat[:, 0], label, dtype=torch.long))
                           for label in (0, 1))  # fmt: skip
        found = (1 - share) * absent + share * present  # a label may be a share between 0 and 1
        return found.unflatten(0, labels.shape).sum(-3).flatten(0, -3)  # type: ignore[no-any-return]

    def _nll(self, labels: Tensor) -> Tensor:
        return -self.likelihood.log_prob(self.logits[None], labels[None])[0]


def _require_untempered(temperature: float) -> None:
    """Raise a ValueError if a prediction has a temperature already."""
    if temperature != 1:
        raise ValueError(
            f"a temperature is fitted to the mixture as it is, and this one is at temperature {temperature:g}:"
            " load the posterior with calibrated=False"
        )


class NumberPredictive:
    """A prediction of numbers."""

    members: tuple[Prediction, Tensor] | None = None

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Raise: there are no probabilities."""
        raise ValueError(
            "a temperature of the mixture needs labels with probabilities, got numbers: switch the calibration off. "
            "The noise_std of a regression has the same purpose"
        )


def number_statistics(mean: Tensor, deviations: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Return [...] means over the D numbers of a label: squared errors, coverage and deviations.

    Args:
        mean: [..., D] of the prediction.
        deviations: name -> [..., D], with the ``predictive_std`` by which a label is covered.
        labels: as many numbers as the mean has.
    """
    squares = (mean - labels.to(mean).reshape(mean.shape)).square()
    covered = (squares.sqrt() <= deviations["predictive_std"]).to(mean.dtype)
    return {name: value.mean(-1) for name, value in {"mse": squares, "covered": covered, **deviations}.items()}


def _member_scores(parts: Tensor, group: LocalMembers) -> dict[str, Tensor]:
    """Return the statistics of single members from the log-likelihoods [m, n, P] of the parts of n terms."""
    return {"member_nll": -group.mean(parts.sum(-1)), "member_log_lik": group.every(parts).movedim(0, -1)}


# -- from the logits of members -------------------------------------------------------------------------------------


class MemberPredictive(NumberPredictive):
    """A mixture of members with equal weights, whose outputs are numbers or rewards.

    Args:
        logits: [M, ..., C] logits of the members in this process.
        group: the processes that hold the other members.
    """

    logits: Tensor
    parts: dict[str, Tensor]

    def __init__(self, logits: Tensor, likelihood: Likelihood, group: LocalMembers) -> None:
        self.member_logits, self.likelihood, self.group = logits, likelihood, group

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean over terms of -log mean_m p_m(label)."""
        terms = self.likelihood.is_term(labels)
        logits, labels = self.member_logits[:, terms], labels[terms]
        per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
        return -self.group.log_mean_exp(per_member).sum() / terms.sum().clamp_min(1)

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL of the mixture and of the members."""
        logits = self.member_logits
        per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
        return {
            "nll": -self.group.log_mean_exp(per_member),
            **_member_scores(per_member[..., None], self.group),
        }


class MemberClasses(ClassPredictive):
    """The log of the members' mean probabilities, at the temperature of the mixture."""

    def __init__(self, logits: Tensor, likelihood: Likelihood, group: LocalMembers, temperature: float = 1.0) -> None:
        prediction = temper(group.predict(logits), temperature)
        super().__init__(prediction.log_probs, prediction.uncertainty._asdict(), likelihood, temperature)
        self.members, self.member_logits, self.group = (prediction, logits), logits, group

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return scores of the mixture, uncertainties, and the NLL of the members."""
        terms = labels != IGNORE
        members, chosen_labels = widened(self.member_logits[:, terms]), labels[terms].long()
        chosen = members.gather(-1, chosen_labels.expand(len(members), -1)[..., None])[..., 0] - members.logsumexp(-1)
        return {**super().statistics(labels), **_member_scores(chosen[..., None], self.group)}


class MemberLabels(LabelPredictive):
    """The members' mean probability of each label, at the temperature of the mixture."""

    def __init__(self, logits: Tensor, likelihood: Likelihood, group: LocalMembers, temperature: float = 1.0) -> None:
        found = group.predict(two_classes(logits))
        super().__init__(found.log_probs, found.uncertainty._asdict(), likelihood, temperature)
        self.member_logits, self.group = logits, group

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL of the mixture and of the members, and uncertainties."""
        logits = self.member_logits
        parts = self.likelihood.log_prob_parts(logits, labels.expand(len(logits), *labels.shape))
        return {**super().statistics(labels), **_member_scores(parts, self.group)}


class MemberNumbers(MemberPredictive):
    """The members' mean and the standard deviations around it."""

    def __init__(self, logits: Tensor, likelihood: Normal, group: LocalMembers) -> None:
        super().__init__(logits, likelihood, group)
        self.noise_std = likelihood.noise_std
        self.logits = group.mean(widened(logits))
        epistemic = group.mean((widened(logits) - self.logits).square())
        self.parts = Deviations((epistemic + likelihood.noise_std**2).sqrt(), epistemic.sqrt())._asdict()

    def with_noise(self, noise_std: float) -> MemberNumbers:
        """Return the prediction with another noise of the labels."""
        return MemberNumbers(self.member_logits, Normal(noise_std), self.group)

    def below(self, labels: Tensor) -> Tensor:
        """Return [B, C] the predictive probability of numbers below the labels, mean_m Phi((y - f_m) / noise_std)."""
        residual = labels.to(self.logits).reshape(self.logits.shape) - widened(self.member_logits)
        return self.group.mean(torch.special.ndtr(residual / self.noise_std))

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL, squared errors, deviations, and the share of labels within one predictive deviation."""
        return super().statistics(labels) | number_statistics(self.logits, self.parts, labels)


_BY_MEMBERS: dict[type[Likelihood], Callable[..., Predictive]] = {
    Categorical: MemberClasses,
    Bernoulli: MemberLabels,
    Normal: MemberNumbers,
}


def of_head_members(
    logits: Tensor, likelihood: Likelihood, group: LocalMembers, temperature: float = 1.0
) -> Predictive:
    """Return the mixture of members with ``logits`` [M, ..., C] under the likelihood of a head of transformers.

    Predictors call ``custom.of_members``, which takes any likelihood.

    Args:
        temperature: the temperature of the mixture; 1 for numbers.
    """
    tempered = {} if temperature == 1 else {"temperature": temperature}
    return _BY_MEMBERS[type(likelihood)](logits, likelihood, group, **tempered)


# -- from Gaussian outputs ------------------------------------------------------------------------------------------


class GaussianClasses(ClassPredictive):
    """The probabilities of classes with Gaussian logits, at the temperature of the mixture."""

    def __init__(self, prediction: GaussianPrediction, likelihood: Likelihood, temperature: float = 1.0) -> None:
        log_probs, parts = prediction.log_probs, prediction.uncertainties
        if temperature != 1:
            log_probs = temper_log_probs(log_probs, temperature)
            parts = temper_uncertainties(log_probs, prediction.total, parts)
        super().__init__(log_probs, parts, likelihood, temperature)


class GaussianLabels(LabelPredictive):
    """The probabilities of several labels, each a choice between the logits 0 and z."""

    def __init__(
        self, mean: Tensor, covariance: Tensor, likelihood: Likelihood, link: str, temperature: float = 1.0
    ) -> None:
        variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=-2, dim2=-1)
        found = LINKS[link](two_classes(mean), two_classes(variance))
        super().__init__(found.log_probs, found.uncertainties, likelihood, temperature)


class GaussianNumbers(NumberPredictive):
    """A regression with Gaussian outputs and Gaussian noise of the labels."""

    def __init__(self, mean: Tensor, covariance: Tensor, likelihood: Normal) -> None:
        self.mean, self.covariance, self.noise_std = mean, covariance, likelihood.noise_std
        self._variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=-2, dim2=-1)
        self.logits, variance = moments(mean, covariance)
        self.parts = Deviations((variance + self.noise_std**2).sqrt(), variance.sqrt())._asdict()

    def loss(self, labels: Tensor) -> Tensor:
        return self._nll(labels).mean()

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the NLL, squared errors, deviations, and the share of labels within one predictive deviation."""
        return {"nll": self._nll(labels)} | number_statistics(self.logits, self.parts, labels)

    def with_noise(self, noise_std: float) -> GaussianNumbers:
        """Return the prediction with another noise of the labels."""
        return GaussianNumbers(self.mean, self.covariance, Normal(noise_std))

    def below(self, labels: Tensor) -> Tensor:
        """Return [B, C] the predictive probability of numbers below the labels, a mean over the K Gaussians."""
        residual = labels.to(self.mean).reshape(self.logits.shape) - self.mean
        return torch.special.ndtr(residual / (self._variance + self.noise_std**2).sqrt()).mean(0)  # type: ignore[no-any-return]

    def _nll(self, labels: Tensor) -> Tensor:
        numbers = labels.to(self.mean).reshape(self.logits.shape)
        return -log_density(numbers, self.mean, self.covariance, self.noise_std)


_BY_GAUSSIAN: dict[type[Likelihood], Callable[..., Predictive]] = {
    Categorical: lambda mean, covariance, likelihood, link, **tempered: GaussianClasses(
        LINKS[link](mean, covariance), likelihood, **tempered
    ),
    Bernoulli: GaussianLabels,
    Normal: lambda mean, covariance, likelihood, link: GaussianNumbers(mean, covariance, likelihood),
}


def of_head_gaussian(
    mean: Tensor, covariance: Tensor, likelihood: Likelihood, link: str, temperature: float = 1.0
) -> Predictive:
    """Return the prediction of K Gaussians of equal weights under the likelihood of a head of transformers.

    Predictors call ``custom.of_gaussian``, which takes any likelihood.

    Args:
        mean: [K, ..., C].
        covariance: [K, ..., C, C], or its diagonal [K, ..., C].
        link: a name of ``gaussian_links.LINKS``; regressions need none.
        temperature: the temperature of the mixture; 1 for numbers.
    """
    tempered = {} if temperature == 1 else {"temperature": temperature}
    return _BY_GAUSSIAN[type(likelihood)](mean, covariance, likelihood, link, **tempered)
