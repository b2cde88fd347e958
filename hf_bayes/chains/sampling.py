"""``sample``: any method on any energy U(theta), with no model, trainer or data set in between."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.chains import sampling_plan as plan
from hf_bayes.chains.energy_objective import EnergyObjective
from hf_bayes.chains.run import Run
from hf_bayes.chains.sampling_plan import Batches, Energy
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import chain_generators
from hf_bayes.core.types import Approximation, Info, Problem
from hf_bayes.diagnostics.convergence import MAX_RHAT, rhat, rhat_by_chance
from hf_bayes.methods.registry import build

MAX_LOOKED_AT = 32
"""Coordinates whose R-hat is looked at."""


@dataclass(frozen=True)
class SampleResult:
    """The result of ``sample``.

    Attributes:
        draws: [M, S, d] where the chains were; of ``mean_field``, ``swa``, ``swag`` and ``mc_dropout`` the mean, the
            average or the weights without masks, which have no spread of the posterior: take ``approximation``.
        approximation: what the method makes of them: ``posterior.Draws`` or ``posterior.Gaussian``.
        info: name -> [num_steps, M], each update's diagnostics; NaN in updates that did not report the name.
        state: the last state (a NamedTuple of tensors).
    """

    draws: Tensor
    approximation: Approximation
    info: dict[str, Tensor]
    state: Any


def sample(
    energy: Energy,
    theta: Tensor,
    method: MethodConfig,
    *,
    num_steps: int,
    learning_rate: float | Callable[[int], float],
    num_data: float = 1,
    batches: Batches | None = None,
    batches_per_step: int = 1,
    batch_fraction: float | None = None,
    burn_in: float = 0,
    thin: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> SampleResult:
    """Run ``num_steps`` updates of ``method`` on exp(-U(theta) / T) and keep a draw after every ``thin`` of them.

    Chains are rows of theta; the draws of chain k depend on (seed, k), not on the number of chains. dtype (float32 or
    float64) and device follow theta. Draws are taken after update ``burn_in + thin``, ``burn_in + 2 * thin``, ... A
    warning names chains of an accept-reject kernel that accept nothing after burn-in, and chains of an exact kernel
    that disagree.

    Args:
        energy: U(theta, batch) [M] for theta [M, d]: minus log-likelihood of all data minus log-prior, in nats; with
            ``batches`` an unbiased estimate of it by one of them, else batch is None. No prior is added to it. Row m
            may depend on row m of theta only, which is checked at the start and at the first and last draw. Outside
            the support it is NaN or infinite, or raises an exception of ``energy_objective.OUTSIDE_SUPPORT``.
        theta: [M, d] starting points of M chains; or [d], the centre of ``method.num_chains`` starting points
            ``method.init_jitter`` apart (relative to the RMS of theta, to 0.01 if it is zero).
        method: a config of ``hf_bayes.METHODS``.
        num_steps: the number of updates.
        learning_rate: step size l in SGD's meaning, theta moves by l * grad U / num_data: a number, or a schedule
            from the update's index (from 0) to a number. The largest is the peak that frictions are fixed by.
        num_data: N, what U is divided by to be a mean loss.
        batches: an iterable, or a function that returns one; it is cycled over.
        batches_per_step: batches of an update; their energies are averaged.
        batch_fraction: n / N, the share of the data in a batch; methods that need it say so.
        burn_in: updates before the first draw: a fraction of the run if below 1, else a number of updates.
        thin: the number of updates from one draw to the next.
        seed: the seed of all random numbers.
        progress: show a progress bar on a terminal if the run takes longer than five seconds.
    Returns:
        ``draws`` [M, S, d] for S draws of each chain, ``approximation`` (``Draws`` or ``Gaussian``), ``info`` (name ->
        [num_steps, M]) and the last ``state``.
    Raises:
        ValueError: for arguments that cannot be run, before the first update; for an energy that is not differentiable,
            writes into theta, or depends on other rows of theta.
        FloatingPointError: at a non-finite energy, gradient or theta, naming update and chain. A Kernel rejects moves
            to where the energy is not finite, or raises for lack of support (``info["energy_raised"]`` counts these);
            a chain must start where it is finite.
    """
    plan.check_arguments(energy, method, batches, batches_per_step, batch_fraction, seed)
    start = plan.starting_points(theta, method, seed)
    problem, rates = plan.problem_of(
        method, learning_rate, dim=start.shape[1], num_data=num_data, num_steps=num_steps, burn_in=burn_in, thin=thin,
        batch_fraction=batch_fraction,
    )  # fmt: skip
    objective = EnergyObjective(energy, batched=batches is not None)
    steps = tqdm(rates, desc=method.name, delay=5.0, disable=None if progress else True)
    result = _run(method, problem, objective, start, _updates(batches, batches_per_step), steps, seed)
    _warn_of_doubts(method, problem, result, objective)
    return result


def _updates(batches: Batches | None, batches_per_step: int) -> Iterator[list[Any]]:
    """Yield the batches of each update, without end."""
    stream = itertools.repeat(None) if batches is None else _cycle(batches)
    while True:
        yield list(itertools.islice(stream, batches_per_step))


def _run(
    method: MethodConfig,
    problem: Problem,
    objective: EnergyObjective,
    start: Tensor,
    updates: Iterator[list[Any]],
    rates: Iterable[float],
    seed: int,
) -> SampleResult:
    """Run the chains from ``start`` [M, d], one update for each rate, and return their draws."""
    rngs = chain_generators(seed, len(start), device=start.device)
    run = Run(build(method, problem), objective, start, rngs, problem, draws_on=start.device)
    infos = _follow(run, objective, updates, rates)
    draws, approximation = torch.stack(run.draws, 1), run.finish()
    return SampleResult(draws, approximation, _stack(infos, len(start)), run.state)


def _follow(
    run: Run[Any], objective: EnergyObjective, updates: Iterator[list[Any]], rates: Iterable[float]
) -> list[Info]:
    """Advance the chains update by update, check that they are independent, and return their diagnostics."""
    start, draw_steps, infos = run.theta, run.problem.draw_steps, []
    for learning_rate, batches in zip(rates, updates, strict=False):
        infos.append(run.update(batches, learning_rate).info)
        if run.num_updates == 1:
            objective.check_independent(start, batches)
        # chains that started at one point have parted by now
        if run.num_updates in (draw_steps[0], draw_steps[-1]):
            objective.check_independent(run.theta, batches)
    return infos


def _warn_of_doubts(method: MethodConfig, problem: Problem, result: SampleResult, objective: EnergyObjective) -> None:
    """Warn of chains that accepted nothing, raised exceptions, or disagree where they should not."""
    _warn_of_refusals(method.name, result.info, problem.burn_in)
    _warn_of_exceptions(method.name, result.info, objective.first_error)
    if method.requirements.all_data_in_every_update:
        _warn_of_disagreement(method.name, result.draws)


def _warn_of_refusals(name: str, info: dict[str, Tensor], burn_in: int) -> None:
    """Warn of chains of an accept-reject kernel that have probably not moved since burn-in."""
    if "acceptance" not in info:
        return
    acceptance = info["acceptance"][burn_in:].double()
    still = (acceptance.sum(0) < 0.05).nonzero().flatten().tolist()  # that any was accepted has a probability below
    if still:
        highest = acceptance.mean(0)[still].max().item()
        warnings.warn(
            f"{name}: {len(still)} of {acceptance.shape[1]} chains (the first is {still[0]}) accept nothing after "
            f"burn-in, their mean acceptance in {len(acceptance)} moves is {highest:.2g} at most: their draws repeat "
            "one point. Use a smaller learning_rate (or the step of the method's config), a longer burn-in, or "
            "starting points of higher probability",
            stacklevel=4,
        )


def _warn_of_exceptions(name: str, info: dict[str, Tensor], first_error: Exception | None) -> None:
    """Warn of moves that were rejected because the energy raised an exception."""
    if first_error is None:
        return
    raised = info["energy_raised"]
    warnings.warn(
        f"{name}: the energy raised an exception in {int(raised.sum())} of {raised.numel()} moves, which were rejected "
        f"as outside the support. The first was {type(first_error).__name__}: {first_error!s:.200}",
        stacklevel=4,
    )


def _warn_of_disagreement(name: str, draws: Tensor) -> None:
    """Warn if the R-hat of coordinates shows that the chains [M, S, d] of an exact kernel have not converged."""
    num_chains, num_draws, dim = draws.shape
    if num_chains < 2 or num_draws < 4:
        return
    looked_at = torch.arange(0, dim, -(-dim // MAX_LOOKED_AT))
    ratios = rhat(draws[..., looked_at]).nan_to_num(0.0, posinf=math.inf)  # what never changes says nothing
    worst = int(ratios.argmax())
    by_chance = rhat_by_chance(num_chains, num_draws, probability=1 - 1e-3 / len(looked_at))
    if float(ratios[worst]) > max(MAX_RHAT, by_chance):
        warnings.warn(
            f"{name}: R-hat {float(ratios[worst]):.3g} of coordinate {int(looked_at[worst])} over {num_chains} chains "
            f"of {num_draws} draws, {MAX_RHAT:g} is allowed: the chains have not converged. Give them a longer "
            "burn-in and more draws (if the law has several modes: compare functions that have the same values in all "
            "modes, by hf_bayes.diagnostics.convergence.unconverged)",
            stacklevel=4,
        )


def _cycle(batches: Batches) -> Iterator[Any]:
    """Yield batches without end. A Mapping is refused: it is probably one batch that is not in a list."""
    if isinstance(batches, (Mapping, Tensor)):
        raise ValueError(f"batches must be an iterable of batches, got one {type(batches).__name__}: put it in a list")
    for passes in itertools.count():
        empty = True
        found = batches() if callable(batches) else batches
        if not isinstance(found, Iterable) and not hasattr(found, "__getitem__"):
            whose = f"a function that returned {found!r:.100}" if callable(batches) else f"{found!r:.100}"
            raise ValueError(f"batches must be an iterable of batches or a function that returns one, got {whose}")
        for batch in found:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "batches is empty"
                if passes == 0
                else f"batches could be read only {passes} time(s) and the run needs more: pass a list, a DataLoader, "
                "or a function that returns a fresh iterator"
            )


def _stack(infos: list[Info], num_chains: int) -> dict[str, Tensor]:
    """Name -> [num_steps, M]; an AdamW warm start reports other names than the method after it."""
    names = dict.fromkeys(name for info in infos for name in info)
    absent = torch.full((num_chains,), math.nan)
    return {
        name: torch.stack(
            [info[name] if name in info else absent.to(next(i[name] for i in infos if name in i)) for info in infos]
        )
        for name in names
    }
