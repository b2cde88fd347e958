"""The noise of a regression that minimises the NLL of held-out rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.metrics.noise_fit import FACTORS, fit_noise


def nll_of(means: Tensor, labels: Tensor, before: float) -> Tensor:
    """Return [n, G] nats of labels [n] under mixtures with means [M, n], at the standard deviations that are tried."""
    stds = (before * FACTORS)[:, None, None]
    log_probs = -0.5 * ((labels - means) / stds).square() - stds.log() - 0.5 * math.log(2 * math.pi)
    return -(log_probs.logsumexp(1) - math.log(len(means))).T


@pytest.fixture
def residuals() -> Tensor:
    return 0.3 * torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("before", [0.1, 0.3, 1.2])
def test_one_mean_gives_the_root_mean_square(residuals: Tensor, before: float) -> None:
    found = fit_noise(nll_of(torch.zeros(1, 2000).double(), residuals, before), before)
    exact = float(residuals.square().mean().sqrt())
    # the spline between 25 values of a smooth function; the step of its logarithm is 0.15
    assert found.noise_std == pytest.approx(exact, rel=1e-3)
    assert found.nll == pytest.approx(
        math.log(before) + 0.5 * math.log(2 * math.pi) + 0.5 * (exact / before) ** 2, rel=1e-9
    )
    assert found.before == before
    assert found.num_rows == 2000


def test_members_that_differ_leave_less_to_the_noise(residuals: Tensor) -> None:
    members = 0.2 * torch.randn(64, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = fit_noise(nll_of(members, residuals, 0.3), 0.3)
    assert found.noise_std == pytest.approx(math.sqrt(0.3**2 - 0.2**2), rel=0.05)  # variances add up


def test_rows_do_not_judge_a_noise_that_was_fitted_to_them() -> None:
    residuals = torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = fit_noise(nll_of(torch.zeros(1, 20).double(), residuals, 1.0), 1.0)
    at_best = math.log(found.noise_std) + 0.5 * math.log(2 * math.pi) + 0.5
    assert found.fitted_nll > at_best + 0.01


def test_the_fit_ends_at_the_tried_noises(residuals: Tensor) -> None:
    found = fit_noise(nll_of(torch.zeros(1, 2000).double(), residuals, 30.0), 30.0)
    assert found.noise_std == pytest.approx(30 / 6, rel=1e-3)


def test_an_nll_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="the NLL of held-out rows is not finite"):
        fit_noise(torch.full((60, len(FACTORS)), torch.nan), 1.0)


def test_the_sentence_has_both_noises(residuals: Tensor) -> None:
    text = fit_noise(nll_of(torch.zeros(1, 2000).double(), residuals, 0.6), 0.6).describe()
    assert text.startswith("noise_std 0.298")
    assert "learnt from 2000 held-out rows (0.6 during the run)" in text
