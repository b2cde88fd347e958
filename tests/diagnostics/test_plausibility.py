"""Distinguish a run that left every plausible region from a run that its data moved far."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import EnsembleConfig, MAPConfig, MeanFieldConfig, SGHMCConfig
from hf_bayes.diagnostics.plausibility import distance_moved, is_implausible, prior_loss_ratio
from hf_bayes.distributions.energy import GaussianPrior, LaplacePrior
from tests import runs

DIM = 1000
LAW: dict[str, Any] = {"data_nats": 0.0, "temperature": 1.0, "prior_weight": 1.0}


@pytest.mark.parametrize("kind", [GaussianPrior, LaplacePrior])
def test_draws_of_the_prior_are_plausible(kind: type) -> None:
    prior = kind(torch.zeros(()), torch.tensor(0.3))
    draws = prior.sample(12, DIM, torch.Generator().manual_seed(0)).view(3, 4, DIM)
    ratios = prior_loss_ratio(prior, draws, torch.zeros(DIM), **LAW)
    # E[z^2] / 2 = 1 / 2 nat per coordinate, or E|z| sqrt(2) = 1
    assert ratios.max() < 1.2
    assert not any(map(is_implausible, ratios.tolist()))


def test_data_may_pull_as_far_as_they_repay() -> None:
    prior, start = GaussianPrior(torch.zeros(()), torch.tensor(1.0)), torch.zeros(DIM)
    draws = torch.full((1, 1, DIM), 6.0)  # 18 nats per coordinate
    assert prior_loss_ratio(prior, draws, start, **LAW).item() == pytest.approx(18.0)
    assert prior_loss_ratio(prior, draws, start, **{**LAW, "data_nats": 17.0 * DIM}).item() == pytest.approx(1.0)
    assert prior_loss_ratio(prior, draws, draws[0, 0], **LAW).item() == 0.0
    assert prior_loss_ratio(prior, draws, start, **{**LAW, "prior_weight": 0.0}) is None


def test_draws_that_are_not_finite_are_implausible() -> None:
    prior = GaussianPrior(torch.zeros(()), torch.tensor(1.0))
    draws = torch.stack([torch.full((1, DIM), value) for value in (1e30, float("nan"))])
    assert prior_loss_ratio(prior, draws, torch.zeros(DIM), **LAW).tolist() == [torch.inf, torch.inf]
    assert is_implausible(None)


@pytest.mark.parametrize("kind", [MAPConfig, EnsembleConfig, MeanFieldConfig, SGHMCConfig])
def test_a_rate_that_destroys_the_model_is_no_silence(kind: Any, tmp_path: Path, caplog: Any) -> None:
    learning_rate = 1e4 if kind is SGHMCConfig else 1e10  # a sampler is not finite before
    for rate, bad in ((learning_rate, True), (1e-2, False)):
        trainer = runs.trainer(tmp_path / str(rate), kind(num_chains=1, prior_std=1.0), learning_rate=rate)
        trainer.train()
        found = trainer.posterior.config.diagnostics
        assert ("left every place that prior and data allow" in found["verdict"]) is bad
        assert all(is_implausible(ratio) is bad for ratio in found["prior_loss_ratio"])
        assert ("left every place" in caplog.text) is bad
        assert not bad or found["converged"] is False
        caplog.clear()


def test_distance_moved_is_in_prior_standard_deviations() -> None:
    prior_std = torch.tensor([0.1, 10.0])
    start = torch.zeros(3, 2)
    theta = torch.tensor([[0.0, 0.0], [0.2, 20.0], [0.2, 0.0]])
    assert torch.allclose(distance_moved(theta, start, prior_std), torch.tensor([0.0, 2.0, math.sqrt(2)]))
    assert torch.allclose(distance_moved(theta, start, 0.1)[2], torch.tensor(math.sqrt(2)))
