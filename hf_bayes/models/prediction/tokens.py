"""Predictors of language models: by members, by linearised members, or by the closed form of a random head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import moved
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.language.causal_members import CausalMembers, HiddenStates
from hf_bayes.models.linearised.language import ClosedHead, drawn, means_of_draws, refuse_backwards_only, tangents
from hf_bayes.models.linearised.outputs import linearisation_of
from hf_bayes.models.predictives.built_in import GaussianClasses, MemberClasses
from hf_bayes.models.predictors import PredictedBy, Predictive, Predictor
from hf_bayes.uncertainty.gaussian_links import LINKS, name_of_link


class TokenPredictor(Predictor, Protocol):
    """A way to predict the next token at positions of a text.

    Attributes:
        keeps_caches: whether keys and values of earlier tokens can be kept from one forward pass to the next.
        has_uncertain_caches: whether keys and values carry noise, which a static cache cannot hold.
        cuts_feed_forward: whether the last feed-forward layer may run at the positions alone that are read.
        tensors_per_state: tensors that are held for each hidden state of a member.
    """

    keeps_caches: bool
    has_uncertain_caches: bool
    cuts_feed_forward: bool
    tensors_per_state: int

    def open(self, model: BayesianModel) -> AbstractContextManager[None]:
        """Prepare the model's members for forward passes until the end of the block."""
        ...

    def predict(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Predictive]]:
        """Yield (flat positions [n], the posterior predictive there), a chunk at a time."""
        ...

    def require_members(self, what: str) -> None:
        """Raise a ValueError if there are no member probabilities, which ``what`` needs."""
        ...


class MemberTokens:
    """Average the members' probabilities of the next token."""

    prediction = "members"
    link: str | None = None
    averages_members = True
    mixes_networks = True
    imitates: PredictedBy | None = None
    keeps_caches, has_uncertain_caches = True, False
    cuts_feed_forward = True
    tensors_per_state = 1

    def __init__(self, causal: CausalMembers) -> None:
        self.causal = causal

    def check_shown(self) -> None:
        """Accept any members."""

    def require_members(self, what: str) -> None:
        """Accept everything that reads the probabilities of members."""

    def open(self, model: BayesianModel) -> AbstractContextManager[None]:
        """Leave the model's members as they are."""
        return nullcontext()

    def member_logits(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (flat positions [n], logits [M, n, V]), a chunk at a time."""
        return self.causal.logits(model.current, states, positions)

    def predict(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Predictive]]:
        """Yield (flat positions [n], the mixture there), a chunk at a time."""
        for index, logits in self.member_logits(model, states, positions):
            yield index, MemberClasses(logits, model.likelihood, model.member_group, model.mixture_temperature)


class LinearisedTokens(MemberTokens):
    """Average over members whose logits are linear in theta: f(x, mean) + J (theta - mean).

    The members that the model holds are the draws of theta, ``members`` of ``from_pretrained``. Each belongs to one
    component of the Gaussian mixture, by its place in the order of ``Gaussian.sample``.

    Raises:
        ValueError: for a posterior that is not Gaussian, for shown members that cannot be paired with the components of
            a mixture, or for a model that PyTorch cannot differentiate in forward mode.
    """

    mixes_networks = False
    keeps_caches = False  # a cache would have to hold derivatives
    tensors_per_state = 2  # a hidden state and its tangent

    def __init__(self, causal: CausalMembers, model: BayesianModel, link: str) -> None:
        super().__init__(causal)
        self.link = link
        self.linearisation = linearisation_of(model, link)
        self.prediction = name_of_link(link)
        self.linearisation.gaussian = moved(self.linearisation.gaussian, model.theta)
        if model.current_members.shown is not None:
            self.check_shown()
        refuse_backwards_only(model, lambda: self._try_tangents(model))

    def check_shown(self) -> None:
        """Raise if shown members would be linear around one of several means, since their component is unknown."""
        self.linearisation.refuse_shown()

    @contextmanager
    def open(self, model: BayesianModel) -> Iterator[None]:
        """Use the means, with tangents towards the draws, until the end of the block."""
        means = self.linearisation.gaussian_at(model.theta).means
        group, temperature = model.member_group, model.mixture_temperature
        with tangents(means_of_draws(means, model), model.current) as theta, model.current_members.restored():
            model.current_members.show(theta, group, temperature)
            yield

    def member_logits(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (flat positions [n], linear logits [M, n, V]), a chunk at a time."""
        for index, logits in super().member_logits(model, states, positions):
            yield index, drawn(logits)

    def _try_tangents(self, model: BayesianModel) -> None:
        """Run a forward pass of two words."""
        with evaluating(model), self.open(model):
            words = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            self.causal.hidden(model, {"input_ids": words, "use_cache": False})


class ClosedFormTokens:
    """Integrate over a Gaussian head in closed form: f(x, mean) and J V J' give the probabilities by ``link``.

    Raises:
        ValueError: for an unknown link, for a posterior that is not Gaussian, and where ``ClosedHead`` does not exist.
    """

    averages_members = False
    mixes_networks = False
    imitates: PredictedBy | None = None
    keeps_caches = has_uncertain_caches = False
    cuts_feed_forward = True
    tensors_per_state = 1

    def __init__(self, causal: CausalMembers, model: BayesianModel, link: str) -> None:
        self.link: str | None = link
        self.linearisation = linearisation_of(model, link)
        self.prediction = name_of_link(link)
        self.head = ClosedHead(model, causal.head, link)
        self.linearisation.gaussian = moved(self.linearisation.gaussian, model.theta)

    def check_shown(self) -> None:
        """Accept any members, since predictions do not read them."""

    def require_members(self, what: str) -> None:
        """Raise: there are no members."""
        raise ValueError(
            f"{what} needs the log-probability of a whole text, a mean over draws, and link {self.link!r} has no "
            "draws: linearise('monte_carlo'), or evaluate single words"
        )

    def open(self, model: BayesianModel) -> AbstractContextManager[None]:
        """Leave the model's members as they are."""
        return nullcontext()

    def predict(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Predictive]]:
        """Yield (flat positions [n], the prediction there), a chunk at a time."""
        gaussian, link = self.linearisation.gaussian_at(model.theta), LINKS[self.linearisation.link]
        found = self.head.outputs(gaussian, states.hidden, states.output, states.num_rows, positions)
        for index, outputs in found:
            yield index, GaussianClasses(link(*outputs), model.likelihood, model.mixture_temperature)


def token_predictor(causal: CausalMembers, model: BayesianModel, link: str | None) -> TokenPredictor:
    """Return the predictor for ``link``; None means by members."""
    if link is None:
        return MemberTokens(causal)
    return LinearisedTokens(causal, model, link) if link == "monte_carlo" else ClosedFormTokens(causal, model, link)
