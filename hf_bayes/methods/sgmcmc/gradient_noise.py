"""The noise that minibatches bring into the gradient of U: compared with what a sampler injects, or taken off it.

``Evaluation.grad_variance`` holds its variance V, estimated from the micro-batches of the update or, now and then, from
the halves of a single one. A sampler that adds
noise of variance q to a momentum moved by -h grad U has q + h^2 V of it in truth; Chen, Fox and Guestrin (2014) inject
the rest only, q - h^2 V (their 2 (C - B) epsilon with B = epsilon V / 2; ``beta`` in posteriors' code is V at T = 1).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import per_element
from hf_bayes.core.requirements import Requirements, need_of_gradient_variance
from hf_bayes.core.types import Info, Problem


@dataclass(frozen=True, kw_only=True)
class LangevinConfig(MethodConfig):
    """What samplers share that add noise to a gradient.

    Attributes:
        measure_gradient_noise: report ``noise_ratio``, the variance of the sampler's own noise over that of its
            gradient. True: of each update, from its micro-batches, of which it takes two (gradient_accumulation_steps
            times processes that share a chain). None: where there is only one, of about every hundredth update, from
            the halves of its rows, of which it takes two; half a gradient each. False: never.
    """

    measure_gradient_noise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure_gradient_noise is not None:
            self._check_flag("measure_gradient_noise", self.measure_gradient_noise)

    @property
    def requirements(self) -> Requirements:
        return Requirements(gradient_variance=need_of_gradient_variance(self.measure_gradient_noise))


@dataclass(frozen=True, kw_only=True)
class CorrectedLangevinConfig(LangevinConfig):
    """A sampler that can take the gradient's noise off its own.

    Attributes:
        correct_gradient_noise: inject less noise by what the gradient brings (Chen et al. 2014), measured likewise.
    """

    correct_gradient_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("correct_gradient_noise", self.correct_gradient_noise)

    @property
    def requirements(self) -> Requirements:
        requirements = super().requirements
        return replace(requirements, gradient_variance="needed") if self.correct_gradient_noise else requirements


def noise_ratio(variance: Tensor | None, problem: Problem, *, injected: float, squared_step: float) -> Info:
    """q / (h^2 V) of each chain, V [M, S] averaged over all coordinates; nothing at T = 0, or where V is not known."""
    if variance is None or (injected == 0 and squared_step > 0):
        return {}
    sizes = torch.tensor(problem.sizes).to(variance)
    per_step = injected / squared_step if squared_step > 0 else math.inf  # its limit
    return {"noise_ratio": per_step / ((variance * sizes).sum(1) / sizes.sum())}


WINDOW = 100
"""Updates that the account looks back on, and that it must have seen before a run is refused."""

MAX_EXCESS = 1.5
"""Of h^2 V over q before a run is refused: two micro-batches and a tensor of one coordinate, the worst case, leave the
mean of 100 estimates of V a standard error of sqrt(2 / 100) = 14 %, 3.5 of which are 0.5."""


class Account(NamedTuple):
    """What ``correct_gradient_noise`` had to inject and what the gradient brought of it; a field [M, 3 + S] of states.

    Both are means over all updates that could tell V, from the hundredth on with a memory of about ``WINDOW`` of them.
    """

    seen: Tensor
    """[M] updates that could tell."""
    lacking: Tensor
    """[M] those of them in which the gradient of a tensor alone brought more than q."""
    injected: Tensor
    """[M] mean of q."""
    brought: Tensor
    """[M, S] mean of h^2 V."""

    @classmethod
    def of(cls, field: Tensor) -> Account:
        return cls(field[:, 0], field[:, 1], field[:, 2], field[:, 3:])

    @property
    def field(self) -> Tensor:
        return torch.cat([torch.stack([self.seen, self.lacking, self.injected], 1), self.brought], 1)


def open_account(theta: Tensor, problem: Problem) -> Tensor:
    """[M, 3 + S]"""
    return theta.new_zeros(len(theta), 3 + len(problem.sizes))


def remaining_std(
    state: Any,
    variance: Tensor | None,
    problem: Problem,
    *,
    name: str,
    injected: float,
    squared_step: float,
) -> tuple[Tensor | float, Any]:
    """sqrt(q - h^2 V) [M, d] from V [M, S], and the state with its ``account`` after it.

    All of the noise in an update that cannot tell V: the last one of a stream may have a single micro-batch.

    Where the gradient alone brings more than q there is none left to inject, and the momenta are hotter than T. V is an
    estimate from a few micro-batches (of two it scatters by sqrt(2) in a tensor of one coordinate), l falls within a
    cycle and V within burn-in; so a single update, or a start, ends no run: the first such update of a run warns. A run
    is refused where nothing of this can excuse it: at a draw, if over the last ``WINDOW`` updates h^2 V was more than
    ``MAX_EXCESS`` times q in most coordinates. Nothing is refused at T = 0, where there is no noise to correct.

    Args:
        state: has ``account``, and ``step`` [M], the updates done; a draw follows those of ``problem.draw_steps``.
    Raises:
        ValueError: then, with both numbers.
    """
    if variance is None:
        return math.sqrt(injected), state
    old, brought = Account.of(state.account), squared_step * variance.to(state.account.dtype)
    gain = 1 / (old.seen + 1).clamp(max=WINDOW)
    left = injected - brought
    lacking = (left < 0).any(1) & (injected > 0)
    new = Account(
        seen=old.seen + 1,
        lacking=old.lacking + lacking,
        injected=old.injected + gain * (injected - old.injected),
        brought=old.brought + gain[:, None] * (brought - old.brought),
    )
    if bool(lacking.any()) and not bool(old.lacking.any()):
        warnings.warn(
            f"{name}: the gradient of {_worst(brought, injected, problem)}, more than correct_gradient_noise has to "
            "inject: a tensor's momenta get no noise in such an update, and are hotter than T where that lasts. Use a "
            "larger batch or a lower learning rate",
            stacklevel=2,
        )
    update = int(state.step[0]) + 1  # all chains have done the same
    if update in problem.draw_steps and bool((new.seen >= WINDOW).all()):
        _require_room(new, problem, name)
    return per_element(left.clamp_min(0).sqrt(), problem.sizes), state._replace(account=new.field)


def _require_room(account: Account, problem: Problem, name: str) -> None:
    """Refuse a run whose gradients bring more noise than there is to inject, for good."""
    sizes = torch.tensor(problem.sizes).to(account.brought)
    beyond = (account.brought > MAX_EXCESS * account.injected[:, None]) & (account.injected > 0)[:, None]
    share = float((beyond * sizes).sum() / (len(beyond) * sizes.sum()))
    if share > 0.5:
        raise ValueError(
            f"{name}: correct_gradient_noise has no noise left to inject in {share:.0%} of the coordinates. Over the "
            f"last {WINDOW} updates the gradient of {_worst(account.brought, account.injected, problem)}: the draws "
            "would be hotter than T by about that ratio. Lower the learning rate or enlarge the batch by it, or leave "
            "correct_gradient_noise out"
        )


def _worst(brought: Tensor, injected: Tensor | float, problem: Problem) -> str:
    """The chain and tensor with the largest h^2 V / q, in words, with both numbers."""
    injected = torch.as_tensor(injected).to(brought).expand(len(brought))
    chain, tensor = divmod(int((brought / injected[:, None]).nan_to_num(0.0).argmax()), brought.shape[1])
    where = list(problem.shapes)[tensor] or "theta"
    numbers = f"h^2 V = {brought[chain, tensor]:.3g} against 2 gamma h T = {injected[chain]:.3g}"
    return f"{where} in chain {chain} alone brings noise of {numbers}"


def require_friction(
    name: str, decay: float, *, h: float, friction: float, lr: float, peak: float, beta: float
) -> None:
    """Refuse an update that would reverse the momentum."""
    if decay < -1e-12:  # beta = 0 at the peak is a decay of 0, up to rounding
        raise ValueError(
            f"{name} needs 1 - h * friction >= 0, got h={h:.4g}, friction={friction:.4g}: learning_rate "
            f"{lr:.4g} is above the peak {peak:.4g} that momentum={beta:g} fixed the friction for. "
            "Make the learning rate the schedule's largest value"
        )
