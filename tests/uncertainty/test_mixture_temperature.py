"""The temperature of a mixture, and the uncertainties at it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.uncertainty.decomposition import predict
from hf_bayes.uncertainty.mixture_temperature import INVERSE_TEMPERATURES, nll_at_temperatures, temper


def member_logits(rows: int = 7, num_classes: int = 5) -> Tensor:
    return 3 * torch.randn(4, rows, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("t", [0.3, 1.0, 2.5])
def test_the_mixture_is_tempered_and_not_its_members(t: float) -> None:
    logits = member_logits()
    power = logits.softmax(-1).mean(0) ** (1 / t)
    expected = power / power.sum(-1, keepdim=True)
    found = temper(predict(logits), t)
    torch.testing.assert_close(found.log_probs.exp(), expected)
    torch.testing.assert_close(found.uncertainty.total, -(expected * expected.log()).sum(-1))
    assert t == 1 or not torch.allclose((logits / t).softmax(-1).mean(0), expected, atol=1e-2)


def test_disagreement_keeps_its_share_in_the_total() -> None:
    before = predict(member_logits()).uncertainty
    after = temper(predict(member_logits()), 0.4).uncertainty
    torch.testing.assert_close(after.epistemic / after.total, before.epistemic / before.total)
    assert torch.equal(after.total, after.aleatoric + after.epistemic)


def test_equal_members_have_no_disagreement_at_any_temperature() -> None:
    equal = predict(member_logits()[:1].expand(4, -1, -1))
    assert not temper(equal, 0.4).uncertainty.epistemic.any()


def test_certain_rows_and_masked_classes_are_finite() -> None:
    logits = torch.tensor([[[200.0, 0.0, -math.inf]], [[200.0, 0.0, -math.inf]]])
    found = temper(predict(logits), 0.5)
    assert found.log_probs[0, 2] == -math.inf
    assert torch.equal(torch.stack(found.uncertainty), torch.zeros(3, 1))


def test_temperature_one_changes_no_bit() -> None:
    prediction = predict(member_logits())
    assert temper(prediction, 1.0) is prediction


def test_derivatives_of_the_nll_are_those_of_autograd() -> None:
    log_probs, labels = predict(member_logits()).log_probs, torch.arange(7) % 5
    found = nll_at_temperatures(log_probs, labels)
    for index, b in enumerate(INVERSE_TEMPERATURES):
        b = b.clone().requires_grad_()
        nll = torch.nn.functional.cross_entropy(b * log_probs, labels, reduction="none")
        for row in range(7):
            (first,) = torch.autograd.grad(nll[row], b, create_graph=True)
            (second,) = torch.autograd.grad(first, b, retain_graph=True)
            expected = torch.stack([nll[row], first, second]).detach()
            torch.testing.assert_close(found[row, index], expected, rtol=1e-9, atol=1e-9)


def test_masked_classes_have_no_part_in_the_derivatives() -> None:
    log_probs = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    masked = torch.cat([log_probs, torch.tensor([[-math.inf]])], 1)
    label = torch.tensor([1])
    torch.testing.assert_close(nll_at_temperatures(masked, label), nll_at_temperatures(log_probs, label))
