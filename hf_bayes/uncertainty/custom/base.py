"""The small interface of a likelihood that a user writes: log p(label | outputs), and the prediction of the outputs.

A likelihood is a frozen dataclass. Its fields are its settings, and are saved with a posterior as JSON under ``name``.

>>> import math, torch
>>> from dataclasses import dataclass
>>> from typing import ClassVar
>>> from hf_bayes import CustomLikelihood, Moments, register_likelihood
>>> @register_likelihood
... @dataclass(frozen=True)
... class DoubleExponential(CustomLikelihood):
...     name: ClassVar[str] = "double_exponential"
...     scale: float = 1.0
...
...     def log_prob(self, outputs, labels):
...         return -(labels - outputs[..., 0]).abs() / self.scale - math.log(2 * self.scale)
...
...     def predict(self, outputs):
...         return Moments(outputs, torch.full_like(outputs, 2 * self.scale**2))
>>> DoubleExponential().log_prob(torch.zeros(3, 1), torch.tensor([0.0, 1.0, -2.0]))
tensor([-0.6931, -1.6931, -2.6931])

Everything else has a default, or is derived by automatic differentiation (``custom.adapted``).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from hf_bayes.uncertainty.likelihoods import Likelihood


class Moments(NamedTuple):
    """The prediction of one member for labels that are numbers; uncertainties are standard deviations.

    Attributes:
        mean: [..., D] the mean of each of the D numbers of a label.
        variance: [..., D] their variances.
    """

    mean: Tensor
    variance: Tensor

    @property
    def num_classes(self) -> None:
        """None: the labels are numbers."""

    @property
    def identified(self) -> Tensor:
        """The part of the prediction that no symmetry of the outputs changes: the means."""
        return self.mean


class ClassLogProbs(NamedTuple):
    """The prediction of one member for labels that are classes; uncertainties are entropies in nats.

    Attributes:
        log_probs: [..., K] the normalised log-probabilities of K classes.
    """

    log_probs: Tensor

    @property
    def num_classes(self) -> int:
        """The number K of classes."""
        return self.log_probs.shape[-1]

    @property
    def identified(self) -> Tensor:
        """The part of the prediction that no symmetry of the outputs changes: centred log-probabilities."""
        return self.log_probs - self.log_probs.mean(-1, keepdim=True)


class LikelihoodConfig:
    """The settings of a likelihood: the fields of a frozen dataclass, which are JSON values.

    Attributes:
        name: the name under which a posterior stores the likelihood.
    """

    name: ClassVar[str]
    stored_as: ClassVar[str] = "likelihood"
    """The key of ``PosteriorConfig.head`` for the settings. A loaded posterior predicts by those under "likelihood"."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The columns of the data that follow the labels in the likelihood's label tensor."""
    weighs_head: ClassVar[bool] = False
    """True if the likelihood changes the head's own, which then needs its own settings (``noise_std``)."""

    advice: ClassVar[str] = ""
    """The remedy if the log-likelihood becomes NaN or infinite in training: a sentence that names a setting."""
    instead_of_pipeline: ClassVar[str] = "call the model itself, which returns predictions and uncertainties"
    """The advice in place of a pipeline, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the fields."""
        return {"name": self.name} | {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    def build(self, num_outputs: int, of_head: Callable[[], Likelihood]) -> Likelihood:
        """Return the likelihood of a head with C outputs.

        Args:
            num_outputs: C.
            of_head: returns the likelihood that belongs to the head's configuration.
        """
        raise NotImplementedError


class CustomLikelihood(LikelihoodConfig, ABC):
    """The likelihood of one label for each input. Only ``log_prob`` and ``predict`` have to be written.

    Shapes: ``outputs`` [..., C] are the outputs of the model's head, in float32 or better. ``labels`` are [...] for one
    number or class, and [..., D] for D numbers. The leading dimensions of both broadcast.
    """

    support: ClassVar[str] = "the finite numbers"
    """The permitted labels, in words."""

    @property
    def num_outputs(self) -> int | None:
        """The number C of outputs that the head must have; None for any number."""
        return None

    @property
    def label_size(self) -> int:
        """The number D of numbers in a label."""
        return 1

    @abstractmethod
    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [...], the log-likelihood of each label in nats, differentiable in the outputs."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Moments | ClassLogProbs:
        """Return what one member predicts: moments of numbers, or log-probabilities of classes."""

    def outside(self, labels: Tensor) -> Tensor:
        """Return a bool tensor of the shape of ``labels``, True where a number is not a label."""
        return ~labels.isfinite()

    def max_log_prob(self) -> float:
        """Return the largest log-likelihood that a label can have; a density may be unbounded."""
        return math.inf

    # -- for curvature (Laplace, and samplers that find their own step size); optional -----------------------------

    def draw(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        """Return labels drawn from the model, by inverting distribution functions. Needed for a sampled GGN.

        Args:
            outputs: [n, C].
            uniforms: [n] or [n, D] in [0, 1), in the shape of the labels. All D numbers come from these alone.
        """
        raise NotImplementedError

    def fisher(self, outputs: Tensor) -> Tensor:
        """Return [n, C, C], the Fisher information in the outputs [n, C]. Needed for an exact GGN."""
        raise NotImplementedError


def _plain(value: Any) -> Any:
    """Return a field as a JSON value: a tuple is a list, a likelihood its own fields."""
    if isinstance(value, LikelihoodConfig):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value
