"""A ladder: chains with settings of their own in one run, of which held-out rows choose one for all.

Chain k begins on rung k mod R. A rung is the method with the temperature and the scale of the prior of this rung. Its
chains are bit by bit those of a run that has these settings alone. After three quarters of the updates between the warm
start and the end of burn-in, the held-out rows choose: the rung whose draws, as one mixture, have the lowest negative
log-likelihood, estimated for as many members as the run will have. Draws at a high temperature differ more, so they
gain more from being many. Draws of a chain within one relaxation are nearly copies, so they count in part. From then on
all chains have the settings of this rung.

No chain is thrown away, because chains that began at other modes are worth more than copies. A chain that moves to
another temperature is scaled instead (``Rule.rescale``): in a Gaussian, a draw at T becomes a draw at T' if its
distance from the mode is multiplied by sqrt(T' / T). The rest of burn-in is for what is not Gaussian.

A temperature is judged by all chains, scaled to it. The draws of its own chains alone are from one or two modes, and do
not show what a high temperature gains from more of them: on real data, they chose too low a temperature. This needs
chains that find their own step size, and so know their mode, and rungs that differ in temperature. Otherwise a rung is
judged by its own chains, at ``NUM_LOOKS`` times.

A hot chain may get lost where the model predicts nothing, and no scaling brings it back. Scaled to the lowest
temperature, all others are near their modes and predict about equally well. So before the choice, a chain that predicts
much worse there goes back to the end of its warm start.

The choice comes early. A chain may need longer than burn-in to arrive at a high temperature, and where it arrives may
predict worse than the places on its way. So the choice of chains that can be scaled is reviewed, after each quarter of
the draws. Where the chains are now (at the end: all draws) is compared with where they were at the choice, scaled to
the next lower temperature. If that is better by more than a standard error (paired by row), T falls, the chains go back
there, and draws from before are left out. A fall costs draws, so it needs more than chance.

Draws at T < 1 are draws of a tempered posterior. Choosing T by held-out rows does not make them draws of the posterior.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.joined_states import inner_state, joined_state, merged, rows_of, scattered, with_inner
from hf_bayes.core.types import (
    DataPasses,
    Evaluation,
    FinalPassResult,
    Info,
    Problem,
    Rngs,
    RowScores,
    Rule,
)
from hf_bayes.diagnostics.comparison import difference_std_error
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig
from hf_bayes.methods.sgmcmc.step_control import relaxation_of

NUM_REVIEWS = 4
"""Reviews of a chosen temperature, the last one of them after the last draw."""

NUM_LOOKS = 4
"""Looks at the chains of a rung that is judged by its own chains alone."""

LOST = 0.5
"""A chain is lost if its nats exceed the median of all chains by more than this share, or are not finite. The share was
chosen on CLINC150 and Debian sections: docs/results/recommend.md has the runs without and with this rule."""

LEAST_BURN_IN = 16
"""The smallest number of updates between the warm start and the end of burn-in: a quarter of them holds the
``NUM_LOOKS`` looks."""


class Rung(NamedTuple):
    """A rung of a ladder.

    Attributes:
        temperature: T.
        prior_scale: the factor of the prior's standard deviations.
        rule: the method with these settings.
    """

    temperature: float
    prior_scale: float
    rule: Rule[Any]


def with_ladder(config: LangevinConfig, problem: Problem, build: Callable[[LangevinConfig, Problem], Any]) -> Rule[Any]:
    """Return the rule of a method whose chains begin on the rungs of ``config.ladder``.

    Args:
        config: the sampler's settings, with a ladder.
        problem: the run.
        build: (config without a ladder, problem) -> the rule of one rung.
    Raises:
        ValueError: if burn-in is too short, or the prior is an inherited posterior and is to be scaled.
    """
    begin, end = config.num_warm_start_steps, problem.burn_in
    if end - begin < LEAST_BURN_IN:
        raise ValueError(
            f"{config.name}: a ladder is climbed in burn-in, which has {end - begin} updates after the warm start, and "
            f"{LEAST_BURN_IN} are needed: train longer, or raise burn_in"
        )
    rungs = tuple(_rung(config, problem, build, settings) for settings in config.rungs)
    quarter = (end - begin) // 4
    choice = begin + 3 * quarter
    scales = problem.own_step_size and len({rung.temperature for rung in rungs}) == len(rungs)
    num_looks = 1 if scales else NUM_LOOKS
    looks = tuple(choice - quarter * look // num_looks for look in reversed(range(num_looks)))
    draws = tuple(problem.draw_steps)
    ladder = _Ladder(config, rungs, looks, scales, draws, _reviews(draws, choice) if scales else ())
    own = {step for rung in rungs for step in rung.rule.early_passes}
    if own and max(own) >= ladder.looks[0]:
        raise ValueError(
            f"{config.name}: the chains measure their noise until update {max(own)}, and the ladder looks at them from "
            f"update {ladder.looks[0]}: raise burn_in, or lower warm_start_steps"
        )
    passes = own | set(ladder.looks) | set(ladder.reviews)
    return Rule(
        init=ladder.init, locate=ladder.locate, update=ladder.update, finish=ladder.finish,
        final_pass=ladder.final_pass, early_passes={step: ladder.pass_after(step) for step in sorted(passes)},
        anchor=ladder.anchor, estimates=ladder.estimates,
    )  # fmt: skip


def _reviews(draws: tuple[int, ...], choice: int) -> tuple[int, ...]:
    """Return the draws after which a choice is reviewed, without the last one: each quarter of all draws."""
    quarters = {draws[-(-len(draws) * part // NUM_REVIEWS) - 1] for part in range(1, NUM_REVIEWS)}
    return tuple(sorted(step for step in quarters if choice < step < draws[-1]))


def _rung(
    config: LangevinConfig,
    problem: Problem,
    build: Callable[[LangevinConfig, Problem], Any],
    settings: dict[str, float],
) -> Rung:
    temperature, scale = settings.get("temperature", config.temperature), settings.get("prior_scale", 1.0)
    prior = problem.prior
    if scale != 1:
        if not isinstance(prior, IndependentPrior):
            raise ValueError(
                f"{config.name}: the prior is an inherited posterior, which a ladder of prior_scale cannot scale: "
                "leave prior_scale out of the ladder"
            )
        prior = prior.scaled(scale)
    rule = build(replace(config, ladder=None, temperature=temperature), problem._replace(prior=prior))
    return Rung(temperature, scale, rule)


@dataclass(frozen=True)
class _Ladder:
    """The parts of the rule.

    Attributes:
        config: the sampler's settings, with its ladder.
        rungs: the rungs.
        looks: the numbers of updates after which the chains are looked at; the choice follows the last one.
        scales: a rung is judged by all chains, scaled to its temperature.
        draws: the numbers of updates that end in a draw.
        reviews: those after which the choice is reviewed.
    """

    config: LangevinConfig
    rungs: tuple[Rung, ...]
    looks: tuple[int, ...]
    scales: bool
    draws: tuple[int, ...]
    reviews: tuple[int, ...]

    def init(self, theta: Tensor, rngs: Rngs) -> Any:
        """Return the state before the first update."""
        on = torch.arange(len(theta), device=theta.device) % len(self.rungs)
        num_kept = 0 if self.scales else len(self.looks)  # chains that are scaled are judged where they are
        seen = theta.new_zeros(len(theta), num_kept, theta.shape[1])
        nll = torch.zeros(len(theta), len(self.rungs), dtype=torch.float64, device=theta.device)
        parts = [(rows, self.rungs[index].rule.init(theta[rows], rngs[rows])) for index, rows in _groups(on)]
        drawn = on[:, None].repeat(1, len(self.draws))
        lost = torch.zeros_like(on)
        own = {"ladder_rung": on, "ladder_nll": nll, "ladder_drawn": drawn, "ladder_lost": lost}
        points = {"ladder_seen": seen, "ladder_home": theta.clone()}  # theta at each look, and at the choice
        return joined_state(own | points, merged(parts))

    def locate(self, state: Any, rngs: Rngs) -> tuple[Tensor, Any]:
        """Return where the gradients are needed."""
        found = [(rows, rung.rule.locate(part, rngs[rows])) for rows, rung, part in self._parts(state)]
        theta = scattered([(rows, theta) for rows, (theta, _) in found])
        return theta, with_inner(state, merged([(rows, part) for rows, (_, part) in found]))

    def anchor(self, state: Any) -> Tensor | None:
        """Return where some rungs need the gradient, too; the others get it at theta, and do not use it."""
        found = [(rows, rung.rule.anchor(part), part.theta) for rows, rung, part in self._parts(state)]
        if all(points is None for _, points, _ in found):
            return None
        return scattered([(rows, theta if points is None else points) for rows, points, theta in found])

    def estimates(self, state: Any) -> bool:
        """Return whether the next update only estimates something: all rungs do that in the same updates."""
        return self.rungs[0].rule.estimates(inner_state(state))

    def update(self, state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        """Return the state after an update of every chain by the rule of its rung."""
        states, infos = [], []
        for rows, rung, part in self._parts(state):
            seen = rows_of(evaluation, rows)
            if seen.anchor_grad is not None and rung.rule.anchor(part) is None:
                seen = seen._replace(anchor_grad=None)
            after, info = rung.rule.update(part, seen, lr, rngs[rows])
            states.append((rows, after))
            infos.append((rows, info))
        common = set.intersection(*(set(info) for _, info in infos))
        figures = {name: scattered([(rows, info[name]) for rows, info in infos]) for name in sorted(common)}
        return with_inner(state, merged(states)), figures

    def pass_after(self, step: int) -> Callable[[Any, DataPasses], Any]:
        """Return the pass after update ``step``: those of the rungs, then a look and the choice, or a review."""

        def early_pass(state: Any, passes: DataPasses) -> Any:
            parts = []
            for rows, rung, part in self._parts(state):
                own = rung.rule.early_passes.get(step)
                parts.append((rows, part if own is None else own(part, passes)))
            state = with_inner(state, merged(parts))
            if step in self.looks and not self.scales:
                seen = state.ladder_seen.clone()
                seen[:, self.looks.index(step)] = state.theta
                state = state._replace(ladder_seen=seen)
            if step == self.looks[-1]:
                return self._choose(state, passes)
            return self._review(state, step, passes) if step in self.reviews else state

        return early_pass

    def _choose(self, state: Any, passes: DataPasses) -> Any:
        """Return the state with all chains on the best rung."""
        state = self._without_lost(state, passes) if self.scales else state
        nll = torch.empty(len(self.rungs), dtype=torch.float64)
        for index, rows in _groups(state.ladder_rung):
            if self.scales:
                there = self._scaled(state, self.rungs[index])
                draws, members = there.theta, self._independent_draws(there)
            else:
                draws = state.ladder_seen[rows].flatten(0, 1)
                members = self.config.num_chains * self.config.draws_per_chain
            nll[index] = passes.heldout(draws, "all", num_members=members)[0]
        state = self._on_rung(state, int(nll.argmin()), self.looks[-1])
        return state._replace(ladder_nll=nll.to(state.ladder_nll).expand_as(state.ladder_nll).clone())

    def _without_lost(self, state: Any, passes: DataPasses) -> Any:
        """Return the state with chains that are lost back at the end of their warm start."""
        theta = self._scaled(state, min(self.rungs, key=lambda rung: rung.temperature)).theta
        scores = passes.heldout_by_row(theta, "even", num_groups=len(theta))
        nll = torch.tensor([score.nll.sum() / score.terms.sum() for score in scores]).to(state.theta)
        lost = ~(nll - nll.nanmedian() <= LOST * nll.nanmedian().abs())
        parts = [(rows, rung.rule.restart(part, lost[rows])) for rows, rung, part in self._parts(state)]
        return with_inner(state, merged(parts))._replace(ladder_lost=lost.to(state.ladder_lost))

    def _review(self, state: Any, step: int, passes: DataPasses, kept: Tensor | None = None) -> Any:
        """Return the state, or that of the choice at a lower temperature, if half of the rows say that it is better.

        Args:
            kept: [M, S, d] after the last update, the draws to compare with the chains as they were at the choice.
        """
        rung = int(state.ladder_rung[0])
        home, now = state._replace(theta=state.ladder_home), None
        while (lower := self._below(rung)) is not None:
            if now is None and kept is not None:
                now = _by_row(kept.flatten(0, 1).to(state.theta), None, passes)
            elif now is None:
                now = _by_row(state.theta, self._independent_draws(state), passes)
            there = self._scaled(home, self.rungs[lower])
            other = _by_row(there.theta, None if kept is not None else self._independent_draws(there), passes)
            if not _is_better(other, now):
                break
            rung, now = lower, other
        return state if rung == int(state.ladder_rung[0]) else self._on_rung(home, rung, step)

    def _below(self, index: int) -> int | None:
        """Return the rung of the next lower temperature, if there is one."""
        lower = [k for k, rung in enumerate(self.rungs) if rung.temperature < self.rungs[index].temperature]
        return max(lower, key=lambda k: self.rungs[k].temperature, default=None)

    def _independent_draws(self, state: Any) -> int:
        """Return the number of draws that will follow, of which those within a relaxation count in part."""
        relaxations = (self.draws[-1] - self.draws[0]) / relaxation_of(self.config, state.step_size)
        return round(float((1 + relaxations).clamp_max(len(self.draws)).sum()))

    def _on_rung(self, state: Any, index: int, step: int) -> Any:
        """Return the state with all chains, and the draws after update ``step``, on a rung."""
        later = torch.tensor([at > step for at in self.draws], device=state.ladder_drawn.device)
        drawn = torch.where(later, index, state.ladder_drawn)
        state = self._scaled(state, self.rungs[index])
        rungs, home = torch.full_like(state.ladder_rung, index), state.theta.clone()
        return state._replace(ladder_rung=rungs, ladder_drawn=drawn, ladder_home=home)

    def _scaled(self, state: Any, rung: Rung) -> Any:
        """Return the state with all chains at the temperature of a rung."""
        parts = []
        for rows, own, part in self._parts(state):
            ratio = rung.temperature / own.temperature
            parts.append((rows, part if ratio == 1 else own.rule.rescale(part, ratio)))
        return with_inner(state, merged(parts))

    def finish(self, state: Any, draws: Tensor) -> Any:
        """Return the draws of all chains."""
        return self.rungs[int(state.ladder_rung[0])].rule.finish(inner_state(state), self._kept(state, draws))

    def final_pass(self, state: Any, draws: Tensor, passes: DataPasses) -> FinalPassResult:
        """Return the draws, the held-out scores of the rungs, and the settings that were chosen."""
        if len(state.ladder_rung.unique()) > 1:  # a run that was stopped before the choice: it keeps its ladder
            return FinalPassResult(self.finish(state, draws), {})
        if self.scales and draws.shape[1] == len(self.draws):  # a run that was stopped has fewer
            state = self._review(state, self.draws[-1], passes, self._kept(state, draws))
        index, drawn = int(state.ladder_rung[0]), state.ladder_drawn[0, : draws.shape[1]].tolist()
        report = {
            "ladder_temperature": [rung.temperature for rung in self.rungs],
            "ladder_prior_scale": [rung.prior_scale for rung in self.rungs],
            "ladder_nll": state.ladder_nll[0].tolist(),
            "ladder_lost": [bool(lost) for lost in state.ladder_lost],
            "ladder_drawn_at": [self.rungs[rung].temperature for rung in drawn],
        }
        fields = {"ladder": None, "temperature": self.rungs[index].temperature, **self.config.rungs[index]}
        return FinalPassResult(self.finish(state, draws), report, None, fields)

    def _kept(self, state: Any, draws: Tensor) -> Tensor:
        """Return the draws [M, S, d] on the last rung; where the chains went back to if there are none."""
        on = state.ladder_drawn[0, : draws.shape[1]] == state.ladder_rung[0]
        return draws[:, on.to(draws.device)] if bool(on.any()) else state.theta[:, None].to(draws)

    def _parts(self, state: Any) -> list[tuple[slice, Rung, Any]]:
        """Return the rows of each rung that has chains, the rung, and the state of its method."""
        whole = inner_state(state)
        return [(rows, self.rungs[index], rows_of(whole, rows)) for index, rows in _groups(state.ladder_rung)]


def _by_row(draws: Tensor, members: int | None, passes: DataPasses) -> RowScores:
    """Return the scores of one mixture on half of the held-out rows."""
    (scores,) = passes.heldout_by_row(draws, "even", num_members=members)
    return scores


def _is_better(other: RowScores, now: RowScores) -> bool:
    """Return whether a score is lower by more than the standard error of the difference."""
    difference = float((other.nll - now.nll).sum() / now.terms.sum())
    return difference < -(difference_std_error(other, now) or 0.0)


def _groups(on: Tensor) -> list[tuple[int, slice]]:
    """Return the rungs that have chains, with these chains: every R-th one before the choice, all of them after it."""
    rungs = on.tolist()
    first = {index: rungs.index(index) for index in sorted(set(rungs))}
    return [(index, slice(at, None, len(first))) for index, at in first.items()]
