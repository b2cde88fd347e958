"""Predictors of classifiers and regressions: by members, or by Gaussian outputs of the linearised model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.linearised.language import drawn, means_of_draws, refuse_backwards_only, tangents
from hf_bayes.models.linearised.outputs import gaussian_outputs, linearisation_of
from hf_bayes.models.predictives import custom as custom_predictives
from hf_bayes.models.predictors import PredictedBy, Predictive, Predictor
from hf_bayes.uncertainty.gaussian_links import name_of_link


class InputPredictor(Predictor, Protocol):
    """A way to predict one answer for each input, or one for each of its tokens."""

    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the posterior predictive of a batch without labels."""
        ...

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return [M, B, ..., C], an output for each member that the model holds, by the function that is integrated."""
        ...


def member_outputs(model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
    """Return [M, B, ..., C], the outputs of the network with the weights of each current member."""
    pieces = []
    with model.members.trunk.run_once():
        for theta in model.passes(inputs):
            with model.members.bind(theta):
                pieces.append(model.outputs(inputs))
    return torch.cat(pieces)


class MemberPredictor:
    """Average the probabilities of the members."""

    prediction = "members"
    link: str | None = None
    averages_members = True
    mixes_networks = True
    imitates: PredictedBy | None = None

    def check_shown(self) -> None:
        """Accept any members."""

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return the outputs of the members."""
        return member_outputs(model, inputs)

    @torch.no_grad()
    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the mixture of the members."""
        logits = member_outputs(model, inputs)
        return custom_predictives.of_members(logits, model.likelihood, model.member_group, model.mixture_temperature)


class LinearisedPredictor:
    """Predict by outputs that are linear in theta, N(f(x, mean), J V J').

    Args:
        link: from Gaussian logits to probabilities; regressions need none.
    Raises:
        ValueError: for an unknown link, or a posterior that is not Gaussian.
    """

    averages_members = False
    mixes_networks = False
    imitates: PredictedBy | None = None

    def __init__(self, model: BayesianModel, link: str) -> None:
        self.link: str | None = link
        self.linearisation = linearisation_of(model, link)
        self.prediction = name_of_link(link)

    def check_shown(self) -> None:
        """Accept any members, since predictions do not read them."""

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return [M, B, ..., C], f(x, mean) + J (theta - mean) of the members that the model holds, draws of theta.

        Raises:
            ValueError: for a model that PyTorch cannot differentiate in forward mode, and for shown members of a
                mixture, since the mean that belongs to each is unknown.
        """
        if model.current_members.shown is not None:
            self.linearisation.refuse_shown()
        means, found = self.linearisation.gaussian_at(model.theta).means, []

        def run() -> None:
            with tangents(means_of_draws(means, model), model.current) as theta, model.members.bind(theta):
                found.append(drawn(model.outputs(inputs)))

        refuse_backwards_only(model, run)
        return found[0]

    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the prediction by Gaussian outputs."""
        outputs = gaussian_outputs(model, self.linearisation.gaussian_at(model.theta), inputs)
        link, temperature = self.linearisation.link, model.mixture_temperature
        return custom_predictives.of_gaussian(*outputs, model.likelihood, link, temperature)
