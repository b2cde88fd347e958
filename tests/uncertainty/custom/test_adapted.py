"""The quantities derived from a user's likelihood, against finite differences and sums over all labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import ClassLogProbs, CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.likelihoods import IGNORE
from tests.uncertainty.custom.cases import OWN, case

DRAWN = [name for name in OWN if "ordinal" not in name]
WITH_FISHER = [name for name in OWN if "mixture" not in name]


@pytest.mark.parametrize("name", OWN)
def test_the_score_is_the_gradient_of_the_log_likelihood(name: str) -> None:
    likelihood, outputs, labels = case(name)
    step, score = 1e-6, likelihood.score(outputs, labels)
    for column in range(outputs.shape[1]):
        moved = torch.zeros_like(outputs)
        moved[:, column] = step
        up, down = (likelihood.log_prob((outputs + sign * moved)[None], labels[None])[0] for sign in (1, -1))
        # central differences in float64: an error of about step^2 and of 1e-16 / step, relative to values of about 10
        assert torch.allclose(score[:, column], (up - down) / (2 * step), atol=1e-6, rtol=1e-6)


COUNT = 4181
"""Points of a Fibonacci lattice, which spreads two numbers evenly over the unit square."""


def lattice(size: int) -> Tensor:
    """Return [COUNT, size] uniforms for one or two numbers."""
    number = torch.arange(COUNT)
    return torch.stack([number, (number * 2584) % COUNT][:size], 1).double().add(0.5) / COUNT


def information(likelihood: Adapted, outputs: Tensor, count: int = COUNT) -> Tensor:
    """Return [n, C, C], the mean of s s' over labels drawn at evenly spread uniforms of a lattice."""
    size = likelihood.config.label_size
    total = torch.zeros(len(outputs), outputs.shape[1], outputs.shape[1], dtype=torch.float64)
    for row, own in enumerate(outputs):
        repeated = own.expand(count, -1)
        uniforms = torch.zeros(count, outputs.shape[1], dtype=torch.float64)
        uniforms[:, :size] = lattice(size)
        score = likelihood.score(repeated, likelihood.draw(repeated, uniforms))
        total[row] = score.T @ score / count
    return total


def root_product(likelihood: Adapted, outputs: Tensor) -> Tensor:
    columns = range(likelihood.num_root_columns(outputs.shape[1]))
    root = torch.stack([likelihood.fisher_root(outputs, column) for column in columns], -1)
    return root @ root.mT


@pytest.mark.parametrize("name", WITH_FISHER)
def test_the_root_is_that_of_the_score_covariance(name: str) -> None:
    likelihood, outputs, _ = case(name)
    expected = information(likelihood, outputs)
    # the lattice integrates squares of normal scores to about 1 %
    assert torch.allclose(root_product(likelihood, outputs), expected, rtol=0.02, atol=0.02)
    # the broken twin, a root without the square root of p or F, is far outside
    assert not torch.allclose(root_product(likelihood, outputs).square(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_labels_have_the_predicted_moments(name: str) -> None:
    likelihood, outputs, _ = case(name)
    size, count = likelihood.config.label_size, COUNT
    uniforms = torch.zeros(count, max(size, outputs.shape[1]), dtype=torch.float64)
    uniforms[:, :size] = lattice(size)
    predicted = likelihood.config.predict(outputs)
    assert isinstance(predicted, Moments)
    for row, own in enumerate(outputs):
        drawn = likelihood.draw(own.expand(count, -1), uniforms).view(count, size)
        # the same lattice: means to 1e-2 of a standard deviation, variances to 2 %
        scale = predicted.variance[row].sqrt()
        assert torch.allclose(drawn.mean(0) / scale, predicted.mean[row] / scale, atol=0.01)
        assert torch.allclose(drawn.var(0), predicted.variance[row], rtol=0.02)


def test_labels_of_ordered_classes_may_be_missing() -> None:
    likelihood, outputs, labels = case("ordinal")
    labels[1] = IGNORE
    assert likelihood.is_term(labels).tolist() == [True, False, True, True, True]
    assert float(likelihood.log_prob(outputs[None], labels[None])[0, 1]) == 0


@dataclass(frozen=True)
class Squared(CustomLikelihood):
    """A likelihood with one mistake of each kind, chosen by its field."""

    name: ClassVar[str] = "squared"
    mistake: str = ""

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        terms = -0.5 * (labels - outputs[..., 0]).square()
        if self.mistake == "mean":
            return terms - terms.mean()
        if self.mistake == "shape":
            return -0.5 * (labels[..., None] - outputs).square()
        return terms.log() if self.mistake == "nan" else terms

    def predict(self, outputs: Tensor) -> Moments | ClassLogProbs:
        if self.mistake == "type":
            return outputs  # type: ignore[return-value]
        means = outputs if self.mistake == "two" else outputs[..., :1]
        return Moments(means, torch.ones_like(means))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("mean", "changes with the other rows of the batch"),
        ("shape", "must return one number for each likelihood term"),
        ("nan", "is not finite for the outputs at the start"),
        ("type", "must return Moments"),
        ("two", r"must return mean \[n, 1\]"),
    ],
)
def test_a_mistake_in_a_likelihood_is_named(mistake: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Adapted(Squared(mistake), 2).check(torch.randn(3, 5, 2), torch.randn(5))


def test_a_correct_likelihood_passes_the_check() -> None:
    Adapted(Squared(), 2).check(torch.randn(3, 5, 2), torch.randn(5))


def test_only_log_prob_and_predict_leave_draw_and_fisher_out() -> None:
    assert Adapted(Squared(), 1).lacks == {"draw", "fisher"}
    assert case("mixture density").likelihood.lacks == {"fisher"}
    assert case("ordinal").likelihood.lacks == frozenset()


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 outputs, and the head has 4: set num_labels=3"):
        Adapted(Ordinal(num_classes=4), 4)
