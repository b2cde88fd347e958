"""The NLL of a regression's predictions at other values of the noise."""

from __future__ import annotations

import torch

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.predictives.built_in import of_head_gaussian, of_head_members
from hf_bayes.models.predictives.noise import nll_at_noise
from hf_bayes.models.predictors import Predictive
from hf_bayes.uncertainty.likelihoods import Normal

LABELS = torch.tensor([[0.1, 0.0], [-0.4, 2.0], [1.5, -1.0]])
MEANS = torch.tensor([[[0.0, 0.1], [1.0, 1.0], [2.0, -1.0]], [[0.5, 0.0], [0.0, 1.5], [1.0, -2.0]]])


def by_members(noise_std: float) -> Predictive:
    return of_head_members(MEANS, Normal(noise_std), LocalMembers())


def by_gaussians(noise_std: float) -> Predictive:
    return of_head_gaussian(MEANS, torch.full_like(MEANS, 0.3), Normal(noise_std), "probit")


def test_every_noise_gives_the_nll_of_a_prediction_with_it() -> None:
    stds = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    for predict in (by_members, by_gaussians):
        expected = torch.stack([predict(std).statistics(LABELS)["nll"] for std in stds.tolist()], -1)
        assert torch.equal(nll_at_noise(predict(7.0), LABELS, stds), expected)
