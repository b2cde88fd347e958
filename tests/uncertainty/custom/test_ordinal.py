"""Ordered classes by cumulative logits."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.uncertainty.custom.ordinal import Ordinal
from tests.uncertainty.custom.cases import case


def test_probabilities_are_differences_of_sigmoids() -> None:
    own = Ordinal(num_classes=4, cutpoints=(-1.0, 0.5, 2.0))
    outputs = torch.randn(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cumulative = torch.nn.functional.pad((torch.tensor(own.cutpoints) - outputs).sigmoid(), (1, 0))
    expected = torch.nn.functional.pad(cumulative, (0, 1), value=1.0).diff(dim=-1)
    # float64 differences of numbers up to 1
    assert torch.allclose(own.predict(outputs).log_probs.exp(), expected, atol=1e-14)


@pytest.mark.parametrize("name", ["ordinal", "ordinal with cutpoints"])
def test_log_prob_is_that_of_the_prediction(name: str) -> None:
    likelihood, outputs, labels = case(name)
    log_probs = likelihood.config.predict(outputs)[0]
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(len(outputs), dtype=torch.float64), atol=1e-12)
    assert torch.equal(likelihood.config.log_prob(outputs, labels), log_probs.gather(1, labels[:, None])[:, 0])


def test_far_outputs_keep_exact_log_probabilities() -> None:
    own = Ordinal(num_classes=3, cutpoints=(0.0, 1.0))
    # class 1 at f = 1000: log(exp(1 - 1000) - exp(0 - 1000)) = -1000 + log(e - 1)
    found = own.predict(torch.tensor([[1000.0]], dtype=torch.float64)).log_probs[0, 1]
    assert float(found) == pytest.approx(-1000 + 0.5413248546)
    assert bool(own.predict(torch.tensor([[1e4], [-1e4]])).log_probs.isfinite().all())


@pytest.mark.parametrize("far", [20.0, -20.0, 200.0])
@pytest.mark.parametrize("cutpoints", [None, (0.0, 1e-6)])
def test_no_class_has_probability_zero(cutpoints: tuple[float, ...] | None, far: float) -> None:
    own = Ordinal(num_classes=3, cutpoints=cutpoints)
    # the distance of 1e-6 is rounded away beside 20 in float32
    outputs = torch.tensor([[far, -30.0]] if cutpoints is None else [[far]], requires_grad=True)
    found = own.predict(outputs).log_probs
    expected = own.predict(outputs.detach().double()).log_probs
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found[0, 1], outputs)
    assert bool(gradient.isfinite().all())


def test_a_larger_output_means_a_larger_class() -> None:
    for own in (Ordinal(num_classes=3), Ordinal(num_classes=3, cutpoints=(0.0, 1.0))):
        outputs = torch.zeros(2, own.num_outputs)
        outputs[1, 0] = 3.0
        low, high = (own.predict(outputs).log_probs.exp() * torch.arange(3.0)).sum(-1)
        assert float(high) > float(low)


@pytest.mark.parametrize("cutpoints", [(1.0, 0.0), (0.0,), (0.0, float("nan"))])
def test_cutpoints_that_do_not_increase_are_refused(cutpoints: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cutpoints must be 2 increasing numbers"):
        Ordinal(num_classes=3, cutpoints=cutpoints)
