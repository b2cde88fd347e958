"""The noise of minibatches in the gradient of U: its comparison with a sampler's own noise, and its correction.

``Evaluation.grad_variance`` holds the variance V of this noise. It is estimated from the micro-batches of the update
or, now and then, from parts of a single one. A sampler that adds noise of variance q to a momentum moved by -h
grad U has noise of variance q + h^2 V in total. Chen, Fox and Guestrin (2014) inject only the rest, q - h^2 V (their
2 (C - B) epsilon with B = epsilon V / 2; ``beta`` in posteriors' code is V at T = 1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import per_element
from hf_bayes.core.requirements import Requirements, WhiteningStructure, need_of_gradient_variance
from hf_bayes.core.types import Info, Problem

MIRRORED_CHAINS = 8
"""The number of chains from which pairs of them are mirror images by default. With fewer, variances would be the
estimates of one to three pairs, and R-hat, which takes chains to be independent, would be too large."""

HEATING, HEATING_OF_TEMPERED = 0.1, 0.4
"""The shares of T that the noise of minibatches may add by default, at T = 1 and at lower T.

With the first one, chains at a low T hardly move: the relaxation is inversely proportional to heating times T. Their
law is not the posterior in any case, so it need not be as exact. On seven real tasks the second one makes predictions
as good or better (docs/results/recommend.md)."""

LEAST_HELDOUT, MOST_HELDOUT = 200, 600
"""The held-out rows that a ladder needs, and those that it reads. Every chain is scored on them at every temperature,
so a large set would cost more than the run itself."""


@dataclass(frozen=True, kw_only=True)
class LangevinConfig(MethodConfig):
    """The base class of samplers that add noise to a gradient.

    Attributes:
        measure_gradient_noise: report ``noise_ratio``, the variance of the sampler's own noise divided by the variance
            of its gradient. True: in every update, from its micro-batches; this requires two of them
            (gradient_accumulation_steps times processes that share a chain). None: as True where there are several
            micro-batches; with a single one, in about every hundredth update, from two parts of its rows, at the
            cost of a quarter of a gradient each. False: never.
        heating: the share of T that the noise of minibatches may add, where the run has no learning rate and the method
            finds its step size (``whitening``). None: ``HEATING`` at T = 1 and above, ``HEATING_OF_TEMPERED`` below.
        whitening: the structure of the curvature whose inverse root gives the coordinates of such a run, "diagonal",
            "kronecker" or, for few parameters, "full". None takes "kronecker" where its bases hold at most
            ``MAX_BASIS`` numbers a chain; in ``sample``, "full" for at most ``energy_settings.MAX_DENSE`` parameters.
        mirrored: in a run without a learning rate, chain 2k + 1 takes minus the noise of chain 2k. Where U is nearly
            quadratic the two chains are mirror images, and the errors of their mean nearly cancel. Each chain has the
            law that it would have alone. Even functions, such as a variance, have the error of half as many chains.
            None: from ``MIRRORED_CHAINS`` chains on.
        ladder: settings of which held-out rows choose one during burn-in, as {"temperature": [1, 0.3, 0.1]},
            {"prior_scale": [0.25, 1, 4]}, or both with lists of one length (``methods.ladder``). Chains begin with the
            settings in turn.
    """

    measure_gradient_noise: bool | None = None
    heating: float | None = None
    whitening: WhiteningStructure | None = None
    mirrored: bool | None = None
    ladder: dict[str, list[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ladder is not None:
            self._check_ladder(self.ladder)
            object.__setattr__(self, "ladder", {name: list(values) for name, values in self.ladder.items()})
        if self.measure_gradient_noise is not None:
            self._check_flag("measure_gradient_noise", self.measure_gradient_noise)
        if self.mirrored is not None:
            self._check_flag("mirrored", self.mirrored)
        if self.heating is not None:
            self._check_number("heating", self.heating, minimum=0.0, strict=True)
        self._check_choice("whitening", self.whitening, (None, "diagonal", "kronecker", "full"))

    @property
    def allowed_heating(self) -> float:
        """``heating``, or its default for the temperature."""
        if self.heating is not None:
            return self.heating
        return HEATING if self.temperature >= 1 else HEATING_OF_TEMPERED

    @property
    def rungs(self) -> list[dict[str, float]]:
        """The settings of each rung of the ladder; none without one."""
        ladder = self.ladder or {}
        return [dict(zip(ladder, values, strict=True)) for values in zip(*ladder.values(), strict=True)]

    def _check_ladder(self, ladder: Any) -> None:
        known = ("temperature", "prior_scale")
        if not isinstance(ladder, Mapping) or not ladder or not set(ladder) <= set(known):
            raise ValueError(
                f"{self.name}: ladder must map {' or '.join(known)} to lists of numbers, got {ladder!r:.100}"
            )
        lengths = set()
        for name, values in ladder.items():
            if not isinstance(values, list | tuple):
                raise ValueError(f"{self.name}: ladder[{name!r}] must be a list of numbers, got {values!r:.100}")
            for value in values:
                self._check_number(f"ladder[{name!r}]", value, minimum=0.0, strict=True)
            lengths.add(len(values))
        if len(lengths) > 1:
            raise ValueError(f"{self.name}: the lists of a ladder must have one length, got {ladder!r:.200}")
        (count,) = lengths
        if count < 2:
            raise ValueError(
                f"{self.name}: a ladder needs at least 2 rungs to choose from, got {count}: add settings, or give the "
                "one as an argument of its own"
            )
        if self.num_chains < count:
            raise ValueError(
                f"{self.name}: a ladder of {count} rungs needs a chain for each, got num_chains={self.num_chains}: "
                "raise num_chains, or leave rungs out"
            )
        for name in ladder:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{self.name}: the ladder chooses {name}, got {name}={getattr(self, name)!r} as well: leave one of "
                    "the two out"
                )

    @property
    def requirements(self) -> Requirements:
        needs = Requirements(
            # a whitened chain has no use for the variance of each tensor
            learning_rate="whitening" if self.temperature > 0 and not self.measure_gradient_noise else "given",
            gradient_variance=need_of_gradient_variance(self.measure_gradient_noise),
            gradient_variance_setting="measure_gradient_noise=True" if self.measure_gradient_noise else "",
            mirrored_chains=self.num_chains >= MIRRORED_CHAINS if self.mirrored is None else self.mirrored,
            whitening=self.whitening,
            allowed_heating=self.allowed_heating,
            cooling_advice="lower the temperature (a ladder chooses it: docs/automatic.md)",
        )
        if self.ladder is None:
            return needs
        chooses_temperature = "temperature" in self.ladder
        lower = "give the ladder lower temperatures (docs/automatic.md)"
        return replace(
            needs,
            heldout="whole",
            heldout_setting="ladder",
            least_heldout=LEAST_HELDOUT,
            most_heldout=MOST_HELDOUT,
            compares_chains=True,
            chooses_temperature=chooses_temperature,
            cooling_advice=lower if chooses_temperature else needs.cooling_advice,
        )


def needs_of_correction(needs: Requirements) -> Requirements:
    """Return the needs of a sampler with ``correct_gradient_noise``, given its needs without this option."""
    return replace(
        needs,
        learning_rate="given",
        gradient_variance="needed",
        gradient_variance_setting="correct_gradient_noise=True",
    )


def noise_ratio(variance: Tensor | None, problem: Problem, *, injected: float, squared_step: float) -> Info:
    """Return q / (h^2 V) of each chain, with V [M, S] averaged over all coordinates.

    The result is empty at T = 0, and where V is not known.
    """
    if variance is None or (injected == 0 and squared_step > 0):
        return {}
    sizes = torch.tensor(problem.sizes).to(variance)
    per_step = injected / squared_step if squared_step > 0 else math.inf  # the limit
    return {"noise_ratio": per_step / ((variance * sizes).sum(1) / sizes.sum())}


WINDOW = 100
"""The number of updates in the means of a ``NoiseStatistics``. No run is refused before so many updates."""

MAX_EXCESS = 1.5
"""The largest h^2 V / q that is not refused.

The worst case is two micro-batches and a tensor of one coordinate. The mean of 100 estimates of V then has a standard
error of sqrt(2 / 100) = 14 %, and 3.5 standard errors are 0.5.
"""


class NoiseStatistics(NamedTuple):
    """The noise that ``correct_gradient_noise`` should inject, and the noise of the gradient.

    States hold it as one tensor. Both are means over all updates with a known V; from the hundredth on they forget
    earlier ones, within about ``WINDOW`` updates.
    """

    num_updates: Tensor
    """[M] number of updates with a known V."""
    exceeded: Tensor
    """[M] number of these updates in which the gradient noise of some tensor exceeded q."""
    injected: Tensor
    """[M] mean of q."""
    from_gradient: Tensor
    """[M, S] mean of h^2 V."""

    @classmethod
    def of(cls, field: Tensor) -> NoiseStatistics:
        """Return the statistics that a state's field [M, 3 + S] holds."""
        return cls(field[:, 0], field[:, 1], field[:, 2], field[:, 3:])

    @property
    def field(self) -> Tensor:
        """The statistics as one tensor [M, 3 + S]."""
        return torch.cat([torch.stack([self.num_updates, self.exceeded, self.injected], 1), self.from_gradient], 1)


def empty_noise_statistics(theta: Tensor, problem: Problem) -> Tensor:
    """Return the field [M, 3 + S] of a ``NoiseStatistics`` before the first update."""
    return theta.new_zeros(len(theta), 3 + len(problem.sizes))


def remaining_std(
    statistics: Tensor,
    step: Tensor,
    variance: Tensor | None,
    problem: Problem,
    *,
    name: str,
    injected: float,
    squared_step: float,
) -> tuple[Tensor | float, Tensor]:
    """Return sqrt(q - h^2 V) [M, d] from V [M, S], and the statistics after this update.

    If V is not known, the whole noise is injected: the last update of a stream may have a single micro-batch.

    If the gradient alone has more noise than q, nothing is left to inject, and the momenta are hotter than T. V is an
    estimate from a few micro-batches: with two, its relative error is sqrt(2) in a tensor of one coordinate. The
    learning rate falls within a cycle, and V falls within burn-in. So a single update, or the start of a run, never
    ends a run; the first such update warns. A run is refused at a draw, if over the last ``WINDOW`` updates h^2 V was
    more than ``MAX_EXCESS`` times q in most coordinates. At T = 0 there is no noise to correct, and no run is refused.

    Args:
        statistics: [M, 3 + S] the field of a ``NoiseStatistics``.
        step: [M] number of updates done; a draw follows the updates of ``problem.draw_steps``.
        variance: [M, S] V, or None.
        injected: q.
        squared_step: h^2.
    Raises:
        ValueError: if the run is refused; the message holds both variances.
    """
    if variance is None:
        return math.sqrt(injected), statistics
    old, from_gradient = NoiseStatistics.of(statistics), squared_step * variance.to(statistics.dtype)
    gain = 1 / (old.num_updates + 1).clamp(max=WINDOW)
    left = injected - from_gradient
    exceeded = (left < 0).any(1) & (injected > 0)
    new = NoiseStatistics(
        num_updates=old.num_updates + 1,
        exceeded=old.exceeded + exceeded,
        injected=old.injected + gain * (injected - old.injected),
        from_gradient=old.from_gradient + gain[:, None] * (from_gradient - old.from_gradient),
    )
    if bool(exceeded.any()) and not bool(old.exceeded.any()):
        warnings.warn(
            f"{name}: the gradient of {_worst(from_gradient, injected, problem)}, more than correct_gradient_noise has "
            "to inject: a tensor's momenta get no noise in such an update, and are hotter than T if that lasts. Use a "
            "larger batch or a lower learning rate",
            stacklevel=2,
        )
    update = int(step[0]) + 1  # all chains have done the same number
    if update in problem.draw_steps and bool((new.num_updates >= WINDOW).all()):
        _require_room(new, problem, name)
    return per_element(left.clamp_min(0).sqrt(), problem.sizes), new.field


def _require_room(statistics: NoiseStatistics, problem: Problem, name: str) -> None:
    """Raise a ValueError if the gradient noise lastingly exceeds the noise to inject."""
    sizes = torch.tensor(problem.sizes).to(statistics.from_gradient)
    injected = statistics.injected[:, None]
    beyond = (statistics.from_gradient > MAX_EXCESS * injected) & (injected > 0)
    share = float((beyond * sizes).sum() / (len(beyond) * sizes.sum()))
    if share > 0.5:
        worst = _worst(statistics.from_gradient, statistics.injected, problem)
        raise ValueError(
            f"{name}: correct_gradient_noise has no noise left to inject in {share:.0%} of the coordinates. Over the "
            f"last {WINDOW} updates the gradient of {worst}: the draws would be hotter than T by about that "
            "ratio. Lower the learning rate or enlarge the batch by it, or leave correct_gradient_noise out"
        )


def _worst(from_gradient: Tensor, injected: Tensor | float, problem: Problem) -> str:
    """Return a phrase that names the tensor with the largest h^2 V / q of a chain, with both numbers."""
    injected = torch.as_tensor(injected).to(from_gradient).expand(len(from_gradient))
    chain, tensor = divmod(int((from_gradient / injected[:, None]).nan_to_num(0.0).argmax()), from_gradient.shape[1])
    where = list(problem.shapes)[tensor] or "theta"
    numbers = f"h^2 V = {from_gradient[chain, tensor]:.3g} against 2 gamma h T = {injected[chain]:.3g}"
    return f"{where} alone brings noise of {numbers}"
