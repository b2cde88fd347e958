"""The temperature of a mixture, fitted on held-out rows (``uncertainty.mixture_temperature``).

The NLL is a convex function of 1 / t. Its values and first two derivatives are summed on a grid in one pass over the
rows, and quintic polynomials join them, so memory does not grow with rows or vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_bayes.uncertainty.mixture_temperature import INVERSE_TEMPERATURES

NUM_GROUPS = 10
"""Rows are dealt to this many groups. A temperature for one group is fitted on the other groups."""

MIN_TERMS = 50
"""A smaller number of held-out terms cannot show that a temperature helps."""

PRIOR_STD = 0.5
"""The standard deviation of a normal prior of log t. It stops t from vanishing where few rows are all predicted right,
and weighs as much as about ten rows."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A temperature, and what it changes on the held-out rows that it was fitted on.

    Attributes:
        temperature: t; 1 if no other temperature is better by more than a standard error.
        log_std_error: the standard error of log t, by leaving groups of rows out (jackknife).
        nll: nats per term of the mixture as it is.
        calibrated_nll: nats per term at t. Each group of rows is judged at the t that the other groups give.
        nll_std_error: the standard error of nll - calibrated_nll over groups of rows.
        num_terms: the number of likelihood terms.
        num_members: the number of members that were averaged; 0 for a closed form.
        prediction: the way of prediction, a name of ``gaussian_links.PREDICTIONS``.
    """

    temperature: float
    log_std_error: float
    nll: float
    calibrated_nll: float
    nll_std_error: float
    num_terms: int
    num_members: int
    prediction: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def describe(self) -> str:
        """Return the result in one sentence."""
        gain = f"held-out NLL {self.nll:.4f} to {self.calibrated_nll:.4f} (+- {self.nll_std_error:.2g})"
        if self.temperature == 1:
            return f"no temperature of the mixture is better than 1 by more than a standard error: {gain}"
        return f"temperature of the mixture {self.temperature:.3g}: {gain}, {self.num_terms} terms"


class GroupSums(NamedTuple):
    """Sums over the held-out terms of each group of rows. Sums of disjoint rows can be added.

    Attributes:
        curves: [NUM_GROUPS, G, 3] sums of ``nll_at_temperatures``.
        terms: [NUM_GROUPS] numbers of terms.
    """

    curves: Tensor
    terms: Tensor

    @classmethod
    def empty(cls) -> GroupSums:
        """Return the sums over no rows."""
        return cls(
            torch.zeros(NUM_GROUPS, len(INVERSE_TEMPERATURES), 3, dtype=torch.float64),
            torch.zeros(NUM_GROUPS, dtype=torch.float64),
        )

    def add(self, values: Tensor, groups: Tensor) -> None:
        """Add [n, G, 3] values of n terms whose rows are in ``groups`` [n]."""
        self.curves.index_add_(0, groups.cpu(), values.double().cpu())
        self.terms.index_add_(0, groups.cpu(), torch.ones(len(groups), dtype=torch.float64))


def fit_calibration(sums: GroupSums, *, num_members: int, prediction: str) -> Calibration:
    """Return the temperature that minimises the NLL of held-out rows, and its cross-fitted gain.

    Args:
        sums: over all held-out rows.
        num_members: the number of members that were averaged; 0 for a closed form.
        prediction: the way of prediction.
    Raises:
        ValueError: for fewer than ``MIN_TERMS`` terms, and for an NLL that is not finite.
    """
    num_terms = int(sums.terms.sum())
    require_enough(num_terms)
    curves, terms = sums.curves.numpy(), sums.terms.numpy()
    if not np.isfinite(curves).all():
        raise ValueError(
            f"a temperature of the mixture needs a finite NLL of the held-out rows, got {curves[..., 0].sum():g}: a "
            "label has probability 0 (a logit of -inf), or a prediction is NaN. Leave out rows whose label cannot "
            "occur, or leave the calibration out"
        )
    used = np.flatnonzero(terms)
    whole = _best(curves.sum(0))
    others = np.array([_best(curves.sum(0) - curves[group]) for group in used])
    gains = np.array([_nll(curves[group], 1.0) - _nll(curves[group], t) for group, t in zip(used, others, strict=True)])
    nll = _nll(curves.sum(0), 1.0) / num_terms
    count = len(used)
    # the variance of a ratio of sums over groups, and the jackknife's of log t
    residuals = gains - gains.sum() / num_terms * terms[used]
    std_error = math.sqrt(count / max(count - 1, 1) * float(np.square(residuals).sum())) / num_terms
    logs = np.log(others)
    log_std_error = math.sqrt((count - 1) / count * float(np.square(logs - logs.mean()).sum()))
    gain = float(gains.sum()) / num_terms
    return Calibration(
        temperature=whole if gain > std_error else 1.0,
        log_std_error=log_std_error,
        nll=nll,
        calibrated_nll=nll - gain,
        nll_std_error=std_error,
        num_terms=num_terms,
        num_members=num_members,
        prediction=prediction,
    )


def require_enough(num_terms: int) -> None:
    """Raise a ValueError for fewer than ``MIN_TERMS`` held-out terms."""
    if num_terms < MIN_TERMS:
        raise ValueError(
            f"a temperature of the mixture needs held-out rows with at least {MIN_TERMS} labels, got {num_terms}: give "
            "more rows, or leave the calibration out"
        )


def _curve(curve: NDArray[np.float64]) -> Any:
    """Return the piecewise quintic polynomial in 1 / t with these values and derivatives [G, 3]."""
    from scipy.interpolate import BPoly

    return BPoly.from_derivatives(INVERSE_TEMPERATURES.numpy(), curve)


def _nll(curve: NDArray[np.float64], temperature: float) -> float:
    return float(_curve(curve)(1 / temperature))


def _best(curve: NDArray[np.float64]) -> float:
    """Return the temperature with the smallest sum of NLL and prior energy."""
    from scipy.optimize import minimize_scalar

    nll, bound = _curve(curve), math.log(float(INVERSE_TEMPERATURES[-1]))

    def energy(log_t: float) -> float:
        return float(nll(math.exp(-log_t))) + 0.5 * (log_t / PRIOR_STD) ** 2

    found = minimize_scalar(energy, bounds=(-bound, bound), method="bounded", options={"xatol": 1e-8})
    return math.exp(float(found.x))
