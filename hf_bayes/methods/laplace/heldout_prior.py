"""The prior precision whose posterior predicts held-out rows best: a descent along the gradient, through the draws.

Draws theta_m(rho) = theta* + L(rho) eps_m, L L' = T (H + rho)^-1, move with the precision rho as long as eps_m stays
what it is. So do the mixture's nats, whose gradient in theta_m the model gives:

    NLL = -1/n sum_t log 1/M sum_m p(y_t | theta_m)
    d NLL / d log rho = sum_m (d NLL / d theta_m) d theta_m / d log rho

Of one precision all rows tell the best. As many as there are tensors or weights fit the rows that chose them, and the
draws' noise: they descend on one half of the rows, and the other half, with noise of its own, says where to end.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.evidence import BOUNDS

NUM_MEMBERS = 10
"""Draws of each Gaussian that a prior is judged by."""

FACTORS = tuple(10 ** (power / 2) for power in range(-4, 5))
"""Of the given prior's standard deviation: where the descent may begin."""

MAX_STEPS = 50
"""Of L-BFGS."""

MAX_LOOKS = 20
"""In one step of it."""

PATIENCE = 5
"""Steps without a better value for the other half of the rows, after which the descent has ended."""


class Judge(Protocol):
    """log of stds relative to the prior's [G] -> nats, and the slope [G] where it is asked for."""

    def __call__(self, where: Tensor, *, slope: bool) -> tuple[float, Tensor | None]: ...


class Found(NamedTuple):
    """Where a search ended.

    Attributes:
        log_factors: [G] of the prior's stds.
        report: {name: nats} on the rows that decide, and which these are: those of "map", no spread at all, of the
            "given" prior, of its best multiple ("common"), and of what was "found".
    """

    log_factors: Tensor
    report: dict[str, Any]


def fit_by_heldout(
    theta: Tensor,
    given: Tensor,
    index: Tensor,
    spread: Callable[[int, Tensor, Tensor], Tensor],
    ask: Callable[..., tuple[float, Tensor | None]],
    *,
    halves: bool,
    seed: int,
) -> tuple[Tensor, dict[str, Any]]:
    """[d]: the precision whose draws, of all rows of ``theta`` as one mixture, predict best; and what to report.

    Args:
        theta: [M, d] the members' means.
        given: [d] precision that is multiplied.
        index: [d] which of the factors each element has.
        spread: number of a member, precision [d], standard normal noise [S, d] -> its draws [S, d] less its mean.
        ask: draws [M, d], which rows, gradient=... -> their mixture's nats and the gradient (``HeldOut``).
        halves: whether half of the rows choose and the other half says where to end.
        seed: of the noise.
    """
    low, high = BOUNDS

    def precision(where: Tensor) -> Tensor:
        return (given.double() * (-2 * where)[index].exp()).clamp(low, high)

    def judge_by(part: str) -> Judge:
        noise = torch.randn(len(theta), NUM_MEMBERS, theta.shape[1], dtype=theta.dtype, generator=generator(seed, part))

        def draw(where: Tensor) -> Tensor:
            tau = precision(where).to(theta)
            rows = zip(theta, noise, strict=True)
            return torch.cat([row + spread(number, tau, own) for number, (row, own) in enumerate(rows)])

        return judge(draw, lambda draws, *, gradient: ask(draws, part, gradient=gradient))

    descend, decide = (judge_by("even"), judge_by("odd")) if halves else (judge_by("all"), None)
    part = "odd" if halves else "all"
    found = search(int(index.max()) + 1, descend, decide, at_map=lambda: ask(theta, part, gradient=False)[0])
    return precision(found.log_factors).to(theta), found.report


def groups_by_expression(expressions: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """[d]: which of the factors each element has, that of the first expression that its tensor's name matches."""
    firsts = [next(k for k, one in enumerate(expressions) if re.search(one, name)) for name in shapes]
    sizes = torch.tensor([math.prod(shape) for shape in shapes.values()])
    return torch.tensor(firsts).unique(return_inverse=True)[1].repeat_interleave(sizes)


def judge(draw: Callable[[Tensor], Tensor], ask: Callable[..., tuple[float, Tensor | None]]) -> Judge:
    """By the chain rule: ``draw`` is differentiable, ``ask(theta, gradient=...)`` gives nats and their gradient."""

    def judged(where: Tensor, *, slope: bool) -> tuple[float, Tensor | None]:
        leaf = where.detach().clone().requires_grad_(slope)
        with torch.set_grad_enabled(slope):
            theta = draw(leaf)
        nats, pull = ask(theta.detach(), gradient=slope)
        if not slope:
            return nats, None
        assert pull is not None
        (found,) = torch.autograd.grad(theta, leaf, pull.to(theta))
        return nats, found

    return judged


def search(num_groups: int, descend: Judge, decide: Judge | None, *, at_map: Callable[[], float]) -> Found:
    """The best stds for ``decide`` along the descent on ``descend``; None: they are few, and it goes on to its minimum.

    Args:
        at_map: nats of the weights themselves, on the rows that decide.
    """
    given = torch.zeros(num_groups, dtype=torch.float64)
    starts = [given + math.log(factor) for factor in FACTORS]
    common = min(starts, key=lambda where: _finite(descend(where, slope=False)[0]))
    judges = descend if decide is None else decide
    values = {name: _finite(judges(where, slope=False)[0]) for name, where in (("given", given), ("common", common))}
    best = common if values["common"] <= values["given"] else given
    least, waited = min(values.values()), 0
    for where in _path(descend, best):
        nats = _finite(judges(where, slope=False)[0])
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
    return Found(best, report)


def _path(descend: Judge, start: Tensor) -> Any:
    """The iterates of L-BFGS, until one does not move or the slope is 0."""
    seen: dict[bytes, tuple[float, Tensor]] = {}
    where = start.clone().requires_grad_()
    worst = 0.0

    def closure() -> float:
        nonlocal worst
        key = where.detach().numpy().tobytes()
        if key not in seen:
            nats, slope = descend(where.detach(), slope=True)
            assert slope is not None
            if not (math.isfinite(nats) and bool(slope.isfinite().all())):
                nats, slope = worst + 1e3, torch.zeros_like(where)  # the line search turns round
            worst = max(worst, nats) if len(seen) < 1 else worst
            seen[key] = nats, slope
        nats, slope = seen[key]
        where.grad = slope / unit
        return nats / unit

    unit = 1.0
    closure()
    # the first step is then 1 in the sum of all logarithms, whatever nats are worth here
    unit = float(where.grad.abs().sum()) if where.grad is not None else 0.0
    if unit == 0:
        return
    optimizer = torch.optim.LBFGS([where], max_iter=1, max_eval=MAX_LOOKS, tolerance_grad=1e-5, tolerance_change=0.0,
                                  line_search_fn="strong_wolfe")  # fmt: skip
    for _ in range(MAX_STEPS):
        before = where.detach().clone()
        with torch.enable_grad():
            optimizer.step(closure)
        moved = float((where.detach() - before).abs().max())
        if moved < 1e-6:
            return
        yield where.detach().clone()


def _finite(nats: float) -> float:
    return nats if math.isfinite(nats) else math.inf
