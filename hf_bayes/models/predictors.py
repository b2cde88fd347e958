"""The ways in which a Bayesian model predicts: by members, linearised, in closed form, in a single pass, by a student.

A model holds one predictor, and ``BayesianModel.linearise`` replaces it. Models of whole inputs take an
``InputPredictor`` (``prediction.inputs``), language models a ``TokenPredictor`` (``prediction.tokens``). A predictor is
given the model in each call and keeps no reference to it, so that a model is freed as soon as it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_bayes.uncertainty.decomposition import Prediction


class MemberLogLik(NamedTuple):
    """The log-likelihood of a batch, summed over its terms, for each member.

    Attributes:
        loss: [M] minus the sum of log-likelihoods in nats, differentiable.
        num_terms: [M] number of terms.
    """

    loss: Tensor
    num_terms: Tensor


class Predictive(Protocol):
    """The posterior predictive distribution of a batch.

    Attributes:
        logits: [..., C] in the shape of the wrapped model's logits.
        parts: name -> [...] uncertainties, or standard deviations, as far as they are defined.
        members: the mixture of the members and their logits [M, ..., C]; None where no members are averaged.
    """

    logits: Tensor
    parts: dict[str, Tensor]
    members: tuple[Prediction, Tensor] | None

    def loss(self, labels: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the likelihood terms among ``labels`` [...]."""
        ...

    def statistics(self, labels: Tensor) -> dict[str, Tensor]:
        """Return [n] numbers of the n likelihood terms among ``labels`` [...], by name."""
        ...

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Return [n, G, 3] of the n likelihood terms, as ``mixture_temperature.nll_at_temperatures``.

        Raises:
            ValueError: if the labels are numbers, or the prediction has a temperature already.
        """
        ...


Reader = Callable[[Predictive, Tensor], dict[str, Tensor]]
"""(prediction, labels) -> tensors by name, one entry for each likelihood term."""

Readings = tuple[dict[str, Tensor], Tensor | None]
"""Tensors by name, one entry for each likelihood term of a batch, and the mixture's logits if they were asked for."""


class PredictedBy(NamedTuple):
    """The way of prediction that a calibration, a threshold or a student belongs to.

    Attributes:
        prediction: a name of ``gaussian_links.PREDICTIONS``, or "distilled".
        num_members: the number of members that a prediction averages, in all processes; 0 if it averages none.
    """

    prediction: str
    num_members: int

    def __str__(self) -> str:
        return f"{self.prediction!r} with {self.num_members} members" if self.num_members else repr(self.prediction)


class Predictor(Protocol):
    """A way to predict.

    Attributes:
        prediction: its name among ``gaussian_links.PREDICTIONS``.
        link: how Gaussian logits become probabilities, a name of ``gaussian_links.LINKS``; None if nothing is
            linearised.
        averages_members: False if predictions integrate over the Gaussian, independently of a number of members.
        mixes_networks: True if the prediction is the mixture of the networks with the weights of the members, so that
            held-out rows can judge any members.
        imitates: what a distilled student imitates; None for other predictors.
    """

    link: str | None
    averages_members: bool
    mixes_networks: bool
    imitates: PredictedBy | None

    @property
    def prediction(self) -> str: ...

    def check_shown(self) -> None:
        """Raise a ValueError if the model cannot predict by members other than its own."""
        ...
