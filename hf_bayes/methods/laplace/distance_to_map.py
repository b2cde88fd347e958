"""The distance from a MAP estimate of the point around which a Gaussian is placed, in numbers and in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_bayes.distributions.covariance import Covariance
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate

MAX_DISPLACEMENT = 1.0
"""The largest root mean square distance of a MAP from the Gaussian's maximum, in the Gaussian's standard deviations."""

MINOR = 0.01
"""The largest share of the parameters that may have a diagonal covariance without a warning: wide layers have few
biases."""


def how_far(
    gradient: GradientEstimate, prior_gradient: Tensor, covariance: Covariance, temperature: float
) -> dict[str, Any]:
    """Return the norm of grad log posterior at theta*, and the Newton step in posterior standard deviations.

    The estimate of a square from a part of the rows may be negative. Then its root is None, and "below_noise" holds its
    name: these rows do not show that the value is zero.

    Args:
        prior_gradient: [d] grad log p(theta).
    """
    norm = _root(gradient, gradient.square(prior_gradient, lambda rows: rows))
    step = _root(gradient, gradient.square(prior_gradient, covariance.product) / temperature / len(prior_gradient))
    found = {"gradient_norm": norm, "displacement": step}
    lost = [name for name, value in found.items() if value is None]
    if step is not None and step > MAX_DISPLACEMENT:
        norm_in_words = _norm_in_words(gradient, norm)
        warnings.warn(
            f"the weights are no MAP: the gradient of log p(theta | D) has {norm_in_words}, and the Gaussian's maximum "
            f"is {step:.2g} standard deviations away in root mean square (a MAP: below {MAX_DISPLACEMENT:g}). The "
            "Gaussian is placed at this point nevertheless. Train longer, lower the learning rate, or let prior_std "
            "fit the weights"
        )
    return {**found, "gradient_rows": gradient.num_rows} | ({"below_noise": lost} if lost else {})


@contextmanager
def gradient_norm_in_errors(gradient: GradientEstimate | None, prior_gradient: Tensor) -> Iterator[None]:
    """Add the norm of the gradient to a ``NotPositiveDefinite`` of the block: away from a MAP there may be no minimum.

    Args:
        prior_gradient: [d] grad log p(theta).
    """
    try:
        yield
    except NotPositiveDefinite as error:
        if gradient is None:
            where = "The gradient was not computed: check_gradient=True shows how far the weights are from a MAP"
        else:
            norm = _root(gradient, gradient.square(prior_gradient, lambda rows: rows))
            norm_in_words = _norm_in_words(gradient, norm)
            where = f"The gradient of log p(theta | D) has {norm_in_words} here and 0 at a MAP: else train longer"
        again = NotPositiveDefinite(f"{error}. {where}")
        again.coordinate = error.coordinate
        raise again from error


def _root(gradient: GradientEstimate, square: float) -> float | None:
    """Return the root of an unbiased square of the gradient; None if noise makes it negative."""
    if gradient.num_rows == gradient.num_data_rows:  # with all rows, only rounding makes it negative
        square = max(square, 0.0)
    return None if square < 0 else math.sqrt(square)


def _norm_in_words(gradient: GradientEstimate, norm: float | None) -> str:
    return f"a norm that {gradient.num_rows} rows cannot distinguish from 0" if norm is None else f"norm {norm:.3g}"


def diagonal_warning(fallbacks: Mapping[str, str], structure: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a warning that lists the tensors whose covariance is diagonal, with reasons; None if they are small."""
    size, whole = (sum(math.prod(shapes[name]) for name in names) for names in (fallbacks, shapes))
    if size <= MINOR * whole:
        return None
    reasons: dict[str, list[str]] = {}
    for name, reason in fallbacks.items():
        reasons.setdefault(reason, []).append(name)
    parts = [f"{len(names)}: {reason} (first {names[0]})" for reason, names in reasons.items()]
    return (
        f"structure={structure!r} keeps the diagonal of {len(fallbacks)} of {len(shapes)} tensors, with {size} "
        f"of {whole} parameters, in whole or on one side: {'; '.join(parts)}. Their names are in "
        "diagnostics['laplace'][k]['diagonal']; structure 'low_rank' or 'full' holds all"
    )


def summary(precision: Tensor, scope: str, sizes: tuple[int, ...]) -> float | list[float]:
    """Return the fitted precision for the report: one number, one per tensor, or smallest, median and largest."""
    if scope == "model" and bool((precision == precision[0]).all()):
        return float(precision[0])
    if scope != "element":  # also for "model", if the given prior differs from tensor to tensor
        return [float(part[0]) for part in precision.split(sizes)]
    return [float(precision.min()), float(precision.median()), float(precision.max())]
