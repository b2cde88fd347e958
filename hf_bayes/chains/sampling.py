"""``sample``: any method on any energy U(theta), with no model, trainer or data set in between."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.chains import sampling_plan as plan
from hf_bayes.chains.doubts import warn_of_doubts
from hf_bayes.chains.energy_checks import check_energy
from hf_bayes.chains.energy_objective import EnergyObjective
from hf_bayes.chains.energy_settings import settle_energy, try_rates
from hf_bayes.chains.initial_state import with_initial_state
from hf_bayes.chains.run import Run
from hf_bayes.chains.sample_result import SampleResult, stack_aux, stack_info
from hf_bayes.chains.sampling_plan import Batches, PriorOfTheta
from hf_bayes.chains.theta_form import Aux, Energy, Form, Theta
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import FinalPassResult
from hf_bayes.methods.assembly import assemble, generators_of
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite


def sample(
    energy: Energy[Theta],
    theta: Theta,
    method: MethodConfig,
    *,
    num_steps: int,
    learning_rate: float | Callable[[int], float] | None = None,
    num_data: float = 1,
    prior: PriorOfTheta | None = None,
    batches: Batches | None = None,
    batches_per_step: int = 1,
    batch_fraction: float | None = None,
    burn_in: float = 0,
    thin: int = 1,
    state: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> SampleResult[Theta]:
    """Run ``num_steps`` updates of ``method`` on exp(-U(theta) / T) and keep a draw after every ``thin`` of them.

    Chains are rows of theta; the draws of chain k depend on (seed, k), not on the number of chains. The dtype (float32
    or float64) and the device are those of theta. Draws are taken after update ``burn_in + thin``,
    ``burn_in + 2 * thin``, ... A warning names chains of an accept-reject kernel that accept nothing after burn-in, and
    chains of an exact kernel that disagree.

    Args:
        energy: U(theta, batch) [M] for theta [M, d], for any M: minus log-likelihood of all data minus log-prior, in
            nats. With ``batches`` it is an unbiased estimate of U from one batch; otherwise batch is None. If theta is
            a dictionary, it gets {name: [M, *shape]}. Row m may depend on row m of theta only, which is checked at the
            start and at the first and last draw. Outside the support it is NaN or infinite, or raises an exception of
            ``support.OUTSIDE_SUPPORT``. It may return (U, aux), with aux a tensor [M, ...] or a mapping of such
            tensors. aux is computed once more at each draw, on the batches of that update, and recorded.
        theta: [M, d] starting points of M chains. Or [d], the centre of ``method.num_chains`` starting points, whose
            standard deviation is ``method.init_jitter`` times the RMS of theta (times 0.01 if theta is zero). Or a
            dictionary {name: [M, *shape]}; draws and members then have this form, too.
        method: a config of ``hf_bayes.METHODS``.
        num_steps: the number of updates.
        learning_rate: step size l as in SGD, where theta moves by l * grad U / num_data. It is a number, or a schedule:
            a function from the update's index (from 0) to a number, which a kernel does not follow. Frictions are
            computed from the largest one. None leaves it to the method (``energy_settings``).
        num_data: N, the number by which U is divided to get a mean loss.
        prior: the prior, if the energy is minus the log-likelihood alone, as ``temper="likelihood"`` and ``fit_prior``
            need it. It is an object of ``hf_bayes.distributions``, or the standard deviation of N(0, std^2), one number
            or {name: number}. None: the energy includes the prior.
        batches: an iterable of batches, or a function that returns one. At its end it begins again.
        batches_per_step: batches of an update; their energies are averaged. With two or more, the noise of the gradient
            is measured for the methods that use it.
        batch_fraction: n / N, the share of the data in a batch; methods that need it say so.
        burn_in: updates before the first draw: a fraction of the run if below 1, else a number of updates. At 0, a
            sampler that finds its own step size takes half of the run.
        thin: the number of updates from one draw to the next.
        state: initial values of the chains' state beside theta, as {field of the method's State: a number or a tensor
            [M, ...]}, such as {"momentum": ...} or {"friction": 0.1}, or the ``state`` of an earlier result.
        seed: the seed of all random numbers.
        progress: show a progress bar on a terminal if the run takes longer than five seconds.
    Returns:
        ``draws`` [M, S, d] for S draws of each chain, ``approximation`` (``Draws`` or ``Gaussian``), ``info`` (name ->
        [num_steps, M]), the last ``state``, ``aux`` and ``report``, see ``SampleResult``.
    Raises:
        ValueError: for arguments that cannot be run, before the first update; for an energy that is not differentiable,
            writes into theta, or depends on other rows of theta; for a random energy with an exact method; for a
            Laplace approximation where there is none.
        FloatingPointError: at a non-finite energy, gradient or theta, naming update and chain. A Kernel instead rejects
            moves out of the support, where the energy is not finite or raises (``info["energy_raised"]`` counts these);
            a chain must start inside it.
    """
    plan.check_arguments(energy, method, prior, batches, batches_per_step, batch_fraction, seed,
                         learning_rate=learning_rate)  # fmt: skip
    form, given = Form.of(theta)
    plan.check_names(method, form)
    plan.burn_in_of(burn_in, num_steps)
    start = plan.starting_points(given, method, seed)
    method.requirements.on_energy.check(start.shape[1])
    arrange = functools.partial(
        plan.problem_of, shapes=form.shapes(start.shape[1]), prior=plan.prior_of(prior, form, start[0]),
        num_data=num_data, num_steps=num_steps, thin=thin, batch_fraction=batch_fraction,
        update_fraction=plan.update_fraction_of(batches, batches_per_step, batch_fraction),
    )  # fmt: skip
    objective = EnergyObjective(
        energy, batched=batches is not None, form=form,
        all_batches=plan.one_pass(batches, num_steps * batches_per_step), requirements=method.requirements,
    )  # fmt: skip

    def find_rate(steps: int) -> float:
        problem, _ = arrange(method, 1.0, burn_in=0)
        updates = _updates(batches, batches_per_step)
        return try_rates(objective, start, problem, updates, num_steps=steps, prior_weight=method.prior_weight)

    method, learning_rate, burn_in = settle_energy(
        method, learning_rate, dim=start.shape[1], num_steps=num_steps, burn_in=burn_in, find_rate=find_rate
    )
    problem, rates = arrange(method, learning_rate, burn_in=burn_in)
    built = assemble(method, problem)
    if state is not None:
        plan.check_state(method)
        built = with_initial_state(built, state, form, name=method.name)
    rngs = generators_of(method, problem, seed, len(start), device=start.device)
    run = Run(built, objective, start, rngs, problem, draws_on=start.device)
    steps = tqdm(rates, desc=method.name, delay=5.0, disable=None if progress else True)
    infos, aux = _follow(run, objective, _updates(batches, batches_per_step), steps)
    draws, info = run.stacked_draws(), stack_info(infos, len(start))
    warn_of_doubts(
        method, info, draws, burn_in=problem.burn_in, first_error=objective.first_error,
        own_step_size=problem.own_step_size,
    )  # fmt: skip
    found = _finish(run, objective)
    return SampleResult(
        form.unflatten(draws), found.approximation, info, run.state, stack_aux(aux), found.report, form, method
    )


def _updates(batches: Batches | None, batches_per_step: int) -> Iterator[list[Any]]:
    """Yield the batches of each update, without end."""
    stream = itertools.repeat(None) if batches is None else _cycle(batches)
    while True:
        yield list(itertools.islice(stream, batches_per_step))


def _follow(
    run: Run[Any], objective: EnergyObjective, updates: Iterator[list[Any]], rates: Iterable[float]
) -> tuple[list[Mapping[str, Tensor]], list[Aux]]:
    """Advance the chains update by update, and check the energy (``check_energy``).

    Returns:
        The diagnostics of each update, and what the energy returned beside its value at each draw, if anything.
    """
    start, draw_steps = run.theta, run.problem.draw_steps
    infos: list[Mapping[str, Tensor]] = []
    found: list[Aux] = []
    for learning_rate, batches in zip(rates, updates, strict=False):
        infos.append(run.update(batches, learning_rate).info)
        values = functools.partial(objective.values, batches=batches)
        if run.num_updates == 1:
            check_energy(values, start, exact=objective.is_exact, number=0)
        # chains that started at one point have parted by now, and a random factor shows where the energy is not 0
        if run.num_updates in (draw_steps[0], draw_steps[-1]):
            check_energy(values, run.theta, exact=objective.is_exact, number=run.num_updates)
        if run.num_updates in draw_steps and objective.returns_aux:
            found.append(objective.aux(run.theta, batches))
    return infos, found


def _finish(run: Run[Any], objective: EnergyObjective) -> FinalPassResult:
    """Return the result of the run.

    Raises:
        ValueError: if there is no Gaussian around the point where a chain ended, naming the coordinate or eigenvalue.
    """
    try:
        with torch.no_grad():
            return run.finish()
    except NotPositiveDefinite as error:
        place = "" if error.coordinate is None else objective.place_of(error.coordinate)
        if not place:
            raise
        raise NotPositiveDefinite(f"{error} (number {error.coordinate}{place})") from error


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
