"""The noise of a regression that minimises the NLL of held-out rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.metrics.noise_fit import FACTORS, NoiseFit, fit_noise


def fitted(means: Tensor, labels: Tensor, of_run: float, centre: float = 0.3) -> NoiseFit:
    """Return the fit to labels [n] under mixtures with means [M, n]."""
    stds = centre * FACTORS
    tried = torch.cat([stds, stds.new_tensor([of_run])])[:, None, None]
    log_probs = -0.5 * ((labels - means) / tried).square() - tried.log() - 0.5 * math.log(2 * math.pi)
    return fit_noise(-(log_probs.logsumexp(1) - math.log(len(means))).T, stds, of_run)


@pytest.fixture
def residuals() -> Tensor:
    return 0.3 * torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("of_run", [0.02, 0.3, 30.0])
@pytest.mark.parametrize("centre", [0.1, 0.3, 1.2])
def test_one_mean_gives_the_root_mean_square(residuals: Tensor, of_run: float, centre: float) -> None:
    found = fitted(torch.zeros(1, 2000).double(), residuals, of_run, centre)
    exact = float(residuals.square().mean().sqrt())
    # the spline between 25 values of a smooth function; the step of its logarithm is 0.15
    assert found.noise_std == pytest.approx(exact, rel=1e-3)
    at_run = math.log(of_run) + 0.5 * math.log(2 * math.pi) + 0.5 * (exact / of_run) ** 2
    assert found.nll == pytest.approx(at_run, rel=1e-9)
    assert found.of_run == of_run
    assert found.num_rows == 2000


def test_members_that_differ_leave_less_to_the_noise(residuals: Tensor) -> None:
    members = 0.2 * torch.randn(64, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = fitted(members, residuals, 0.3)
    assert found.noise_std == pytest.approx(math.sqrt(0.3**2 - 0.2**2), rel=0.05)  # variances add up


def test_rows_do_not_judge_a_noise_that_was_fitted_to_them() -> None:
    residuals = torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = fitted(torch.zeros(1, 20).double(), residuals, 1.0, 1.0)
    at_best = math.log(found.noise_std) + 0.5 * math.log(2 * math.pi) + 0.5
    assert found.fitted_nll > at_best + 0.01


def test_an_nll_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="the NLL of held-out rows is not finite"):
        fit_noise(torch.full((60, len(FACTORS) + 1), torch.nan), FACTORS, 1.0)


def test_the_sentence_has_both_noises(residuals: Tensor) -> None:
    text = fitted(torch.zeros(1, 2000).double(), residuals, 0.6).describe()
    assert text.startswith("noise_std 0.298")
    assert "learnt from 2000 held-out rows (0.6 during the run)" in text
