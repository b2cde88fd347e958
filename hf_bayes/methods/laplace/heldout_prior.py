"""The prior precision whose posterior predicts held-out rows best, by descent along the gradient through the draws.

For fixed noise eps_m, the draws theta_m(rho) = theta* + L(rho) eps_m, L L' = T (H + rho)^-1, are functions of the
precision rho. So is the mixture's negative log-likelihood, and the model gives its gradient in theta_m:

    NLL = -1/n sum_t log 1/M sum_m p(y_t | theta_m)
    d NLL / d log rho = sum_m (d NLL / d theta_m) d theta_m / d log rho

A single precision is fitted to all rows. As many precisions as tensors or weights would overfit the rows, and the noise
of the draws. So they descend on one half of the rows, and the other half, with separate noise, determines where to end.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.evidence import BOUNDS

NUM_MEMBERS = 10
"""The number of draws of each Gaussian by which a prior is scored."""

FACTORS = tuple(10 ** (power / 2) for power in range(-4, 5))
"""The multiples of the given prior's standard deviation from which the descent may start."""

MAX_STEPS = 50
"""The largest number of L-BFGS steps."""

MAX_EVALUATIONS = 20
"""The largest number of evaluations in one L-BFGS step."""

SMALLEST_STEP = 1e-3
"""The descent ends at a step that changes no log factor by more: held-out rows do not determine a thousandth."""

PATIENCE = 5
"""The number of steps without a better value on the other half of the rows after which the descent ends."""


class Loss(Protocol):
    """The held-out loss in nats per term, as a function of log factors [G] of the prior's standard deviations."""

    def __call__(self, where: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
        """Return the loss at ``where``, and its gradient [G] if ``gradient`` is true."""
        ...


class Score(Protocol):
    """The held-out score of draws [M, d]: mean negative log-likelihood of their mixture, and the gradient [M, d]."""

    def __call__(self, theta: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]: ...


class ScoreOfPart(Protocol):
    """A ``Score`` with a choice of the held-out rows (``HeldOut.part``)."""

    def __call__(self, theta: Tensor, part: str, *, gradient: bool) -> tuple[float, Tensor | None]: ...


class SearchResult(NamedTuple):
    """The end of a search.

    Attributes:
        log_factors: [G] log factors of the prior's standard deviations.
        report: "rows" names the deciding rows. The other entries are losses on them: "map" of the weights alone,
            "given" of the given prior, "common" of its best multiple, and "found" of the result.
    """

    log_factors: Tensor
    report: dict[str, Any]


def fit_by_heldout(
    theta: Tensor,
    given: Tensor,
    index: Tensor,
    deviations: Callable[[int, Tensor, Tensor], Tensor],
    score: ScoreOfPart,
    *,
    split: bool,
    seed: int,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the precision [d] whose draws predict best, as one mixture over all rows of ``theta``, and a report.

    Args:
        theta: [M, d] the members' means.
        given: [d] the precision that is multiplied by factors.
        index: [d] the index of the factor of each element.
        deviations: (index of a member, precision [d], standard normal noise [S, d]) -> its draws [S, d] minus its mean.
        score: the score of draws on a part of the held-out rows.
        split: descend on the even rows, and stop by the odd rows.
        seed: seed of the noise.
    """
    low, high = BOUNDS

    def precision(where: Tensor) -> Tensor:
        return (given.double() * (-2 * where)[index].exp()).clamp(low, high)

    def loss_on(part: str) -> Loss:
        noise = torch.randn(len(theta), NUM_MEMBERS, theta.shape[1], dtype=theta.dtype, generator=generator(seed, part))

        def draw(where: Tensor) -> Tensor:
            tau = precision(where).to(theta)
            rows = zip(theta, noise, strict=True)
            return torch.cat([row + deviations(number, tau, own) for number, (row, own) in enumerate(rows)])

        return loss_of_draws(draw, functools.partial(score, part=part))

    descend, decide = (loss_on("even"), loss_on("odd")) if split else (loss_on("all"), None)
    part = "odd" if split else "all"
    found = search(int(index.max()) + 1, descend, decide, at_map=lambda: score(theta, part, gradient=False)[0])
    return precision(found.log_factors).to(theta), found.report


def groups_by_expression(expressions: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Return the index of the factor of each element, [d]: the first expression that matches its tensor's name."""
    firsts = [next(k for k, one in enumerate(expressions) if re.search(one, name)) for name in shapes]
    sizes = torch.tensor([math.prod(shape) for shape in shapes.values()])
    index: Tensor = torch.tensor(firsts).unique(return_inverse=True)[1]
    return index.repeat_interleave(sizes)


def loss_of_draws(draw: Callable[[Tensor], Tensor], score: Score) -> Loss:
    """Return the loss of ``draw(log_factors)``, with its gradient by the chain rule; ``draw`` is differentiable."""

    def loss(where: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
        leaf = where.detach().clone().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            theta = draw(leaf)
        nats, of_draws = score(theta.detach(), gradient=gradient)
        if not gradient:
            return nats, None
        assert of_draws is not None
        (found,) = torch.autograd.grad(theta, leaf, of_draws.to(theta))
        return nats, found

    return loss


def search(num_groups: int, descend: Loss, decide: Loss | None, *, at_map: Callable[[], float]) -> SearchResult:
    """Return the best log factors for ``decide`` along the descent on ``descend``.

    With ``decide=None`` the descent continues to the minimum of ``descend``.

    Args:
        at_map: returns the loss of the weights themselves, on the deciding rows.
    """
    given = torch.zeros(num_groups, dtype=torch.float64)
    starting_points = [given + math.log(factor) for factor in FACTORS]
    common = min(starting_points, key=lambda where: _finite(descend(where, gradient=False)[0]))
    deciding = descend if decide is None else decide
    candidates = {"given": given, "common": common}
    values = {name: _finite(deciding(where, gradient=False)[0]) for name, where in candidates.items()}
    best = common if values["common"] <= values["given"] else given
    least, waited = min(values.values()), 0
    for where in _iterates(descend, best):
        nats = _finite(deciding(where, gradient=False)[0])
        waited = 0 if nats < least else waited + 1
        if nats < least:
            best, least = where, nats
        if decide is not None and waited >= PATIENCE:
            break
    alone = at_map()
    report = {"rows": "all" if decide is None else "odd", "map": alone, **values, "found": least}
    if alone < least:
        warnings.warn(
            f"held-out rows are predicted best by the weights alone: {alone:.4g} nats, with the best spread "
            f"{least:.4g}. Draws of this curvature are not better than the MAP: train it with another prior_std, take "
            "another estimator or structure, or predict by linearise()"
        )
    return SearchResult(best, report)


def _iterates(loss: Loss, start: Tensor) -> Iterator[Tensor]:
    """Yield the iterates of L-BFGS, until they stop moving or the gradient is 0."""
    seen: dict[bytes, tuple[float, Tensor]] = {}
    where = start.clone().requires_grad_()
    worst = 0.0

    def closure() -> float:
        nonlocal worst
        key = where.detach().numpy().tobytes()
        if key not in seen:
            nats, gradient = loss(where.detach(), gradient=True)
            assert gradient is not None
            if not (math.isfinite(nats) and bool(gradient.isfinite().all())):
                nats, gradient = worst + 1e3, torch.zeros_like(where)  # the line search goes back
            worst = max(worst, nats) if len(seen) < 1 else worst
            seen[key] = nats, gradient
        nats, gradient = seen[key]
        where.grad = gradient / unit
        return nats / unit

    unit = 1.0
    closure()
    # in this unit the first step is 1 in the sum of all logarithms, whatever the scale of the loss
    unit = float(where.grad.abs().sum()) if where.grad is not None else 0.0
    if unit == 0:
        return
    optimizer = torch.optim.LBFGS(
        [where], max_iter=1, max_eval=MAX_EVALUATIONS, tolerance_grad=1e-5, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    for _ in range(MAX_STEPS):
        before = where.detach().clone()
        with torch.enable_grad():
            optimizer.step(closure)
        moved = float((where.detach() - before).abs().max())
        if moved < SMALLEST_STEP:
            return
        yield where.detach().clone()


def _finite(nats: float) -> float:
    return nats if math.isfinite(nats) else math.inf
