from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_bayes.uncertainty.several_labels import decompose_labels, summed, two_classes
from tests.uncertainty.brute_force import random_logits


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy of a yes-or-no answer."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)


def sets_of_labels(logits: Tensor) -> Tensor:
    """Return [M, N, 2^C]: each member's probability of each set of labels."""
    probs = logits.sigmoid()
    choices = torch.tensor(list(itertools.product([0.0, 1.0], repeat=logits.shape[-1])), dtype=logits.dtype)
    return (probs[..., None, :] * choices + (1 - probs[..., None, :]) * (1 - choices)).prod(-1)


def test_uncertainties_are_binary_entropies_summed_over_labels() -> None:
    logits = random_logits(6, 40, 5, dtype=torch.float64)
    probs = logits.sigmoid()
    total, aleatoric = entropy(probs.mean(0)).sum(-1), entropy(probs).mean(0).sum(-1)
    found = decompose_labels(logits)
    torch.testing.assert_close(found.total, total, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.aleatoric, aleatoric, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.epistemic, total - aleatoric, rtol=0, atol=1e-10)
    assert torch.equal(found.total, found.aleatoric + found.epistemic)
    # the twin: an entropy of the classes that softmax would make is another number
    assert ((found.total - torch.special.entr(logits.softmax(-1).mean(0)).sum(-1)).abs() > 0.01).any()


def test_aleatoric_is_exact_and_the_sums_are_upper_bounds() -> None:
    logits = random_logits(4, 30, 3, spread=2.0, dtype=torch.float64)
    sets = sets_of_labels(logits)
    joint_total = torch.special.entr(sets.mean(0)).sum(-1)
    joint_aleatoric = torch.special.entr(sets).sum(-1).mean(0)
    found = decompose_labels(logits)
    torch.testing.assert_close(found.aleatoric, joint_aleatoric, rtol=0, atol=1e-10)
    assert (found.total >= joint_total - 1e-12).all()
    assert (found.epistemic >= joint_total - joint_aleatoric - 1e-12).all()
    assert (found.epistemic > joint_total - joint_aleatoric + 0.01).any()  # the bound is not an identity


def test_one_label_of_equal_odds_has_log_two_nats() -> None:
    logits = torch.tensor([[[0.0]], [[0.0]]])
    found = decompose_labels(logits)
    assert float(found.total) == pytest.approx(math.log(2))
    assert float(found.epistemic) == 0
    apart = decompose_labels(torch.tensor([[[60.0]], [[-60.0]]]))
    assert float(apart.epistemic) == pytest.approx(math.log(2))


def test_parts_that_are_not_defined_stay_out_of_the_sum() -> None:
    assert set(summed({"total": torch.ones(3, 2)})) == {"total"}


def test_a_label_is_a_choice_between_zero_and_its_logit() -> None:
    logits = torch.tensor([[1.5, -2.0]])
    torch.testing.assert_close(two_classes(logits).softmax(-1)[..., 1], logits.sigmoid())


def test_a_diverged_member_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of member 1 .* hold NaN"):
        decompose_labels(torch.tensor([[[0.0]], [[math.nan]]]))
