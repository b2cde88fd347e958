"""The noise of a regression, fitted to held-out rows: the standard deviation with the smallest NLL.

The NLL of the posterior predictive is computed at several standard deviations. A cubic spline over their logarithms
joins the values, so that one pass over the rows is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_bayes.metrics.calibration import NUM_GROUPS

MIN_LABELS = 50
"""A smaller number of held-out labels does not determine a noise: with 50 its error is a tenth."""

FACTORS = torch.logspace(-1, 1, 25, base=6, dtype=torch.float64)
"""[G] The standard deviations to try, as multiples of the root mean square of the residuals."""


@dataclass(frozen=True, kw_only=True)
class NoiseFit:
    """A standard deviation of the labels' noise, and what it changes on the held-out rows that it was fitted on.

    Attributes:
        noise_std: the standard deviation, in units of the labels.
        of_run: the standard deviation that the run had.
        nll: nats per row at ``of_run``.
        fitted_nll: nats per row at ``noise_std``. Each tenth of the rows is judged at the noise that is fitted to the
            other nine tenths.
        num_rows: the number of rows.
    """

    noise_std: float
    of_run: float
    nll: float
    fitted_nll: float
    num_rows: int

    def describe(self) -> str:
        """Return the result in one sentence."""
        return (
            f"noise_std {self.noise_std:.3g}, learnt from {self.num_rows} held-out rows ({self.of_run:.3g} during the "
            f"run): held-out NLL {self.nll:.4f} to {self.fitted_nll:.4f}"
        )


def fit_noise(nll: Tensor, noise_stds: Tensor, of_run: float) -> NoiseFit:
    """Return the noise that minimises the NLL of held-out rows.

    Args:
        nll: [n, G + 1] nats of each row at each of ``noise_stds``, and at ``of_run``.
        noise_stds: [G] a multiple of ``FACTORS``.
        of_run: the standard deviation that the run had.
    Raises:
        ValueError: for an NLL that is not finite.
    """
    values = nll.double().cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError("the NLL of held-out rows is not finite at some noise: check their labels and the predictions")
    values, at_run = values[:, :-1], values[:, -1]
    groups = np.arange(len(values)) % NUM_GROUPS
    sums = np.stack([values[groups == group].sum(0) for group in range(NUM_GROUPS)])
    without_group = [_best(sums.sum(0) - one) for one in sums]
    fitted = sum(float(_curve(one)(log_factor)) for one, log_factor in zip(sums, without_group, strict=True))
    return NoiseFit(
        noise_std=float(noise_stds[0] / FACTORS[0]) * math.exp(_best(sums.sum(0))),
        of_run=of_run,
        nll=float(at_run.mean()),
        fitted_nll=fitted / len(values),
        num_rows=len(values),
    )


def _curve(nll: NDArray[np.float64]) -> Any:
    """Return the spline of [G] sums of NLL over the logarithm of the factor."""
    from scipy.interpolate import CubicSpline

    return CubicSpline(FACTORS.log().numpy(), nll)


def _best(nll: NDArray[np.float64]) -> float:
    """Return the logarithm of the factor with the smallest NLL."""
    from scipy.optimize import minimize_scalar

    # the NLL of a mixture may have several valleys far from the best noise: search beside the best value of the grid
    logs, best = FACTORS.log().numpy(), int(nll.argmin())
    bounds = logs[max(0, best - 1)], logs[min(len(logs) - 1, best + 1)]
    found = minimize_scalar(_curve(nll), bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return float(found.x)
