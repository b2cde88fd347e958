"""Predictors by a distilled student: one forward pass of one network, and a small head on its last hidden state.

The model holds the network of the student as its only member. ``uncertainty.student_head`` has the equations,
``fit.distil`` trains the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.language.causal_members import CausalMembers, HiddenStates
from hf_bayes.models.loading.student_network import student_network
from hf_bayes.models.prediction.inputs import member_outputs
from hf_bayes.models.prediction.output_layer import OutputLayer
from hf_bayes.models.predictives.built_in import ClassPredictive
from hf_bayes.models.predictors import PredictedBy, Predictive
from hf_bayes.posteriors.student import DISTILLED
from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty
from hf_bayes.uncertainty.likelihoods import Likelihood
from hf_bayes.uncertainty.mixture_temperature import temper
from hf_bayes.uncertainty.student_head import StudentHead, head_from


class StudentClasses(ClassPredictive):
    """The probabilities and uncertainties of a student, at the temperature of the mixture."""

    def __init__(self, prediction: Prediction, likelihood: Likelihood, temperature: float = 1.0) -> None:
        tempered = temper(prediction, temperature)
        super().__init__(tempered.log_probs, tempered.uncertainty._asdict(), likelihood, temperature)
        # the student is one distribution: a mixture of one member, whose uncertainties come from its head. The
        # temperature belongs to the mixture of a token, and members have none
        self.members = tempered, prediction.log_probs[None]

    def nll_at_temperatures(self, labels: Tensor) -> Tensor:
        """Raise: the temperature belongs to the mixture that the student imitates."""
        raise ValueError(
            "a student takes the temperature of the prediction that it imitates: call fit_calibration without "
            "prediction='distilled'"
        )


class Student:
    """The part that the predictors of all tasks share.

    Attributes:
        imitates: the prediction that the student imitates.

    Raises:
        ValueError: if the posterior of the model has no student, or the model holds members.
    """

    prediction = DISTILLED
    link: str | None = None
    averages_members = False
    mixes_networks = False

    def __init__(self, model: BayesianModel) -> None:
        if model.posterior is None:
            raise ValueError("a model without a posterior has no distilled student: load one with from_pretrained")
        network = student_network(model.posterior).to(model.theta)
        if model.theta.shape != network.shape or not torch.equal(model.theta, network):
            raise ValueError(
                "the model holds members, and a distilled student reads one network: load the posterior with "
                "from_pretrained(..., prediction='distilled')"
            )
        description = model.posterior.config.student
        self.imitates: PredictedBy | None = PredictedBy(description["prediction"], description["num_members"])
        self.head: StudentHead = head_from(model.posterior.student or {})

    def check_shown(self) -> None:
        """Raise: the student has learnt to read the hidden states of its own network."""
        raise ValueError(
            "a distilled student reads one network, and cannot predict by other members: load the posterior without "
            "prediction='distilled'"
        )

    def on(self, device: torch.device) -> StudentHead:
        """Return the head on a device."""
        if self.head.features.weight.device != device:
            self.head = self.head.to(device)
        return self.head


class DistilledPredictor(Student):
    """Predict classes of inputs, or of their tokens, by a student."""

    def __init__(self, model: BayesianModel) -> None:
        super().__init__(model)
        assert model.posterior is not None
        self.layer = OutputLayer(model, model.posterior.config.student["output"])

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return the outputs of the student's network, the only member."""
        return member_outputs(model, inputs)

    @torch.no_grad()
    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the prediction of the student."""
        with model.members.bind(model.current):
            hidden = self.layer.hidden(model, inputs)
            rows = hidden.flatten(0, -2)
            found = self.on(hidden.device)(rows, lambda states: self.layer.logits(model, states))
        shape = hidden.shape[:-1]
        parts = Uncertainty(*(part.view(shape) for part in found.uncertainty))
        prediction = Prediction(found.log_probs.view(*shape, -1), parts)
        return StudentClasses(prediction, model.likelihood, model.mixture_temperature)


class DistilledTokens(Student):
    """Predict the next token by a student."""

    keeps_caches, has_uncertain_caches = True, False
    cuts_feed_forward = True
    tensors_per_state = 1

    def __init__(self, causal: CausalMembers, model: BayesianModel) -> None:
        super().__init__(model)
        self.causal = causal

    def require_members(self, what: str) -> None:
        """Accept everything: the student is a mixture of one member."""

    def open(self, model: BayesianModel) -> AbstractContextManager[None]:
        """Leave the model's network as it is."""
        return nullcontext()

    @torch.no_grad()
    def predict(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Predictive]]:
        """Yield (flat positions [n], the student's prediction there), a chunk at a time."""
        head, student = self.causal.head, self.on(states.hidden.device)
        with model.members.bind(model.current):
            hidden = head.per_member(states.hidden, states.num_rows)[0]
            for index in torch.split(positions, head.chunk_size(hidden)):
                found = student(hidden[index], lambda rows: head.logits(rows[None], states.output)[0])
                yield index, StudentClasses(found, model.likelihood, model.mixture_temperature)
