"""What is said of the point that a Gaussian is put around, in numbers and in words: how far it is from a MAP."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_bayes.distributions.covariance import Covariance
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite
from hf_bayes.methods.laplace.gradient_estimate import Slope

MAX_DISPLACEMENT = 1.0
"""Root mean square distance from theta* to the Gaussian's own maximum, in its standard deviations, that is no MAP."""


def how_far(slope: Slope, pull: Tensor, covariance: Covariance, temperature: float) -> dict[str, Any]:
    """How near theta* is to a maximum: norm of grad log posterior, and the Newton step in posterior stds.

    From a part of the rows a square may come out below 0: its root is None then, and named in "below_noise". Zero
    would be a claim that these rows cannot make.

    Args:
        pull: [d] grad log p(theta).
    """
    norm = _root(slope, slope.square(pull, lambda rows: rows))
    step = _root(slope, slope.square(pull, covariance.product) / temperature / len(pull))
    found = {"gradient_norm": norm, "displacement": step}
    lost = [name for name, value in found.items() if value is None]
    if step is not None and step > MAX_DISPLACEMENT:
        said = _norm_in_words(slope, norm)
        warnings.warn(
            f"the weights are no MAP: the gradient of log p(theta | D) has {said}, and the Gaussian's maximum "
            f"is {step:.2g} standard deviations away in root mean square (a MAP: below {MAX_DISPLACEMENT:g}). The "
            "curvature is that of this point all the same. Train longer, lower the learning rate, or let prior_std fit "
            "the weights"
        )
    return {**found, "gradient_rows": slope.num_rows} | ({"below_noise": lost} if lost else {})


@contextmanager
def telling_how_far(slope: Slope | None, pull: Tensor) -> Iterator[None]:
    """What is refused inside is so with the norm of the gradient: no MAP, no minimum.

    Args:
        pull: [d] grad log p(theta).
    """
    try:
        yield
    except NotPositiveDefinite as error:
        if slope is None:
            where = "Whether the weights are a MAP was not looked at: check_gradient=True tells"
        else:
            said = _norm_in_words(slope, _root(slope, slope.square(pull, lambda rows: rows)))
            where = f"The gradient of log p(theta | D) has {said} here and 0 at a MAP: else train longer"
        raise NotPositiveDefinite(f"{error}. {where}") from error


def pull_of(precision: Tensor | Covariance, offset: Tensor) -> Tensor:
    """[d]: grad log p(theta) of a Gaussian prior."""
    return precision.precision_product(-offset) if isinstance(precision, Covariance) else -precision * offset


def _root(slope: Slope, square: float) -> float | None:
    """Of an unbiased square of the gradient; None where some of the rows do not tell it from 0."""
    if slope.num_rows == slope.num_data_rows:  # what is below 0 there is rounding
        square = max(square, 0.0)
    return None if square < 0 else math.sqrt(square)


def _norm_in_words(slope: Slope, norm: float | None) -> str:
    return f"a norm that {slope.num_rows} rows do not tell from 0" if norm is None else f"norm {norm:.3g}"


def what_is_diagonal(fallbacks: Mapping[str, str], structure: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a structure cannot hold: how much of theta, and for which reasons."""
    reasons: dict[str, list[str]] = {}
    for name, reason in fallbacks.items():
        reasons.setdefault(reason, []).append(name)
    parts = [f"{len(names)}: {reason} (first {names[0]})" for reason, names in reasons.items()]
    size, whole = (sum(math.prod(shapes[name]) for name in names) for names in (fallbacks, shapes))
    return (
        f"structure={structure!r} keeps the diagonal of {len(fallbacks)} of {len(shapes)} tensors, with {size} "
        f"of {whole} parameters, in whole or on one side: {'; '.join(parts)}. Their names are in "
        "diagnostics['laplace'][k]['diagonal']; structure 'low_rank' or 'full' holds all"
    )


def summary(precision: Tensor, scope: str, sizes: tuple[int, ...]) -> float | list[float]:
    """For the report: the one, one for each tensor, or least, median and greatest of all elements."""
    if scope == "model" and bool((precision == precision[0]).all()):
        return float(precision[0])
    if scope != "element":  # of the model, too, where the given prior differs from tensor to tensor
        return [float(part[0]) for part in precision.split(sizes)]
    return [float(precision.min()), float(precision.median()), float(precision.max())]
