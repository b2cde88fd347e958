"""Predictions under a user's likelihood, against the law of total variance and closed forms."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.predictives import built_in as predictives
from hf_bayes.models.predictives import custom
from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry, Preferences
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.weighted import Weighted, WeightedRows
from hf_bayes.uncertainty.gaussian_links import LINKS
from hf_bayes.uncertainty.likelihoods import Categorical, Normal

HETEROSCEDASTIC, ORDINAL = Adapted(Heteroscedastic(), 2), Adapted(Ordinal(num_classes=4), 3)


def test_deviations_follow_the_law_of_total_variance() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 2)
    found = custom.of_members(logits, HETEROSCEDASTIC, LocalMembers())
    draws = logits[..., :1] + (1e-6 + logits[..., 1:].exp()).sqrt() * torch.randn(5, 3, 40_000)
    # 200,000 draws: 1 % of a standard deviation is more than 4 standard errors
    assert torch.allclose(found.parts["predictive_std"][:, 0], draws.std((0, 2)), rtol=0.01)
    aleatoric, epistemic = found.parts["aleatoric_std"], found.parts["epistemic_std"]
    assert torch.allclose(aleatoric.square() + epistemic.square(), found.parts["predictive_std"].square())
    assert torch.allclose(found.logits, logits[..., :1].mean(0))


def test_equal_members_have_no_epistemic_deviation() -> None:
    logits = torch.randn(1, 3, 2).expand(4, 3, 2)
    parts = custom.of_members(logits, HETEROSCEDASTIC, LocalMembers()).parts
    # a mean of four equal float32 numbers
    assert float(parts["epistemic_std"].max()) < 1e-6


def test_the_loss_is_that_of_the_mixture() -> None:
    logits, labels = torch.randn(5, 3, 2), torch.randn(3)
    found = custom.of_members(logits, HETEROSCEDASTIC, LocalMembers())
    per_member = torch.stack([HETEROSCEDASTIC.config.log_prob(one, labels) for one in logits])
    expected = -per_member.exp().mean(0).log()
    assert torch.allclose(found.statistics(labels)["nll"], expected)
    assert torch.allclose(found.loss(labels), expected.mean())


def test_ordered_classes_average_probabilities() -> None:
    logits, labels = torch.randn(5, 3, 3), torch.tensor([0, 3, -100])
    found = custom.of_members(logits, ORDINAL, LocalMembers())
    probs = torch.stack([ORDINAL.config.predict(one)[0] for one in logits]).exp().mean(0)
    assert torch.allclose(found.logits.exp(), probs)
    assert torch.allclose(found.loss(labels), -(probs[0, 0].log() + probs[1, 3].log()) / 2)
    assert torch.allclose(found.parts["total"], -(probs * probs.log()).sum(-1), atol=1e-6)


def test_gaussian_outputs_give_the_closed_form_of_a_regression() -> None:
    mean = torch.tensor([[[0.3, -1.0]]], dtype=torch.float64)
    covariance = torch.tensor([[[[0.5, 0.0], [0.0, 0.0]]]], dtype=torch.float64)  # the variance is known
    own = custom.of_gaussian(mean, covariance, HETEROSCEDASTIC, "monte_carlo")
    noise_std = float((1e-6 + torch.tensor(-1.0).exp()).sqrt())
    exact = predictives.of_head_gaussian(mean[..., :1], covariance[..., :1, :1], Normal(noise_std), "monte_carlo")
    labels = torch.tensor([0.7], dtype=torch.float64)
    # 1000 draws: 4 standard errors of a mean are .09, of a standard deviation 9 %, and of the density's mean about 5 %
    assert float(own.logits) == pytest.approx(float(exact.logits), abs=0.09)
    for name in ("predictive_std", "epistemic_std"):
        assert float(own.parts[name]) == pytest.approx(float(exact.parts[name]), rel=0.09)
    assert float(own.loss(labels)) == pytest.approx(float(exact.loss(labels)), abs=0.05)
    assert own.members is None
    assert not [name for name in own.statistics(labels) if name.startswith("member_")]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("likelihood", [HETEROSCEDASTIC, ORDINAL], ids=lambda likelihood: likelihood.name)
def test_a_row_is_predicted_as_if_it_were_alone(likelihood: Adapted, full: bool) -> None:
    torch.manual_seed(0)
    mean = torch.randn(2, 5, likelihood.num_outputs, dtype=torch.float64)  # two components, five rows
    covariance = torch.rand_like(mean)
    covariance = torch.diag_embed(covariance) if full else covariance
    together = custom.of_gaussian(mean, covariance, likelihood, "monte_carlo")
    alone = custom.of_gaussian(mean[:, 3:4], covariance[:, 3:4], likelihood, "monte_carlo")
    # float64 products in batches of another size
    torch.testing.assert_close(together.logits[3:4], alone.logits, rtol=1e-12, atol=1e-12)
    for name, value in together.parts.items():
        torch.testing.assert_close(value[3:4], alone.parts[name], rtol=1e-9, atol=1e-12)


def test_weights_do_not_judge_predictions() -> None:
    likelihood = WeightedRows(Weighted(), Categorical())
    logits, labels = torch.randn(5, 3, 4), torch.tensor([0, 3, 1])
    joined = torch.stack([labels.float(), torch.tensor([5.0, 0.0, 1.0])], 1)
    found = custom.of_members(logits, likelihood, LocalMembers())
    expected = custom.of_members(logits, Categorical(), LocalMembers())
    assert torch.equal(found.loss(joined), expected.loss(labels))
    assert torch.equal(found.statistics(joined)["nll"], expected.statistics(labels)["nll"])


@pytest.mark.parametrize("link", LINKS)
def test_a_constant_of_both_rewards_cancels(link: str) -> None:
    likelihood = Preferences(BradleyTerry())
    mean = torch.tensor([[[3.0, 2.0]]], dtype=torch.float64)
    own = torch.diag_embed(torch.tensor([[[0.5, 0.7]]], dtype=torch.float64))
    found, shifted = (custom.of_gaussian(mean, own + constant, likelihood, link).logits.exp() for constant in (0, 100))
    assert torch.allclose(found, shifted)
    z = 1 + 1.2**0.5 * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # the exact probability; the probit link is within 1 % of it, and draws of the link have an error of 0.3 %
    assert float(found[0, 0]) == pytest.approx(float(z.sigmoid().mean()), abs=0.02)
    # the broken twin: variances of both rewards without their covariance
    wrong = predictives.of_head_gaussian(mean, (own + 100).diagonal(dim1=-2, dim2=-1), Categorical(), link).logits.exp()
    assert float(wrong[0, 0]) < float(found[0, 0]) - 0.05


def test_single_texts_have_gaussian_rewards() -> None:
    mean = torch.tensor([[[1.0]], [[2.0]]])  # two components
    found = custom.of_gaussian(mean, torch.full((2, 1, 1, 1), 0.5), Preferences(BradleyTerry()), "probit")
    assert found.logits.item() == 1.5
    assert found.parts["epistemic_std"].item() == pytest.approx(0.75**0.5)  # the law of total variance
