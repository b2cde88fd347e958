"""The settings of ``sample`` without a learning rate: the method's own choices, and a rate of AdamW from a trial.

* A sampler begins with AdamW and then finds its step size in whitened coordinates (``sgmcmc.whitening``). The curvature
  is the Hessian with the absolute values of its eigenvalues; of many parameters, the absolute value of its diagonal.
* An optimiser, and the warm start of a sampler, take the rate of AdamW that reaches the lowest energy in a trial
  (``try_rates``). All M chains try each rate for n updates on the same batches, and the rate falls linearly to 0. As in
  a trainer, a run of N updates gets best * sqrt(n / N). A rate at which the energy is not finite, or raises outside its
  support, is out of the trial.
* A kernel that adapts its step size in burn-in begins at ``FIRST_STEP``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from hf_bayes.chains.objective import Objective
from hf_bayes.chains.own_settings import MAX_UPDATES, best_rate, choose_settings, last_third, with_stated_warm_start
from hf_bayes.chains.run import Run
from hf_bayes.chains.support import is_outside_support
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import burn_in_steps
from hf_bayes.core.types import Problem
from hf_bayes.methods.assembly import adamw_rule, with_whitening

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""The rates of a trial. An update of AdamW moves every element of theta by about the rate."""

MIN_UPDATES = 6
"""The smallest number of updates at each rate of a trial. With fewer, rates differ by noise only."""

TRIAL_SHARE = 0.1
"""The length of a trial, as a share of the run, unless each rate then has fewer than ``MIN_UPDATES`` updates."""

MAX_DENSE = 512
"""The largest number of parameters that a sampler whitens with the whole Hessian, which takes 2 MiB for a chain in
float64. With more parameters it uses the diagonal, which takes as many products with vectors."""

FIRST_STEP = 0.1
"""The step size at which a kernel begins its search."""


class EnergySettings(NamedTuple):
    """The settings that a run is made with.

    Attributes:
        method: the config, with numbers in place of settings that were left open.
        learning_rate: the peak, or a schedule; None if the method finds a step size of its own during the run.
        burn_in: the burn-in (an int: updates; a float: a share of the run) of the user, or of the method, which chooses
            it together with its warm start.
    """

    method: MethodConfig
    learning_rate: float | Callable[[int], float] | None
    burn_in: float


FindRate = Callable[[int], float]
"""updates of AdamW in the run -> its learning rate."""


def settle_energy(
    method: MethodConfig,
    learning_rate: float | Callable[[int], float] | None,
    *,
    dim: int,
    num_steps: int,
    burn_in: float,
    find_rate: FindRate,
) -> EnergySettings:
    """Return the settings of a run of ``num_steps`` updates.

    Args:
        dim: d, the number of parameters.
        method, learning_rate, burn_in: the arguments of ``sample``.
        find_rate: a function that tries rates of AdamW and returns the best; it is called only if a rate is needed.
    Raises:
        ValueError: if the method needs a learning rate, or has no update after its warm start.
    """
    burned, needs = burn_in_steps(burn_in, num_steps), method.requirements
    if learning_rate is not None:
        return EnergySettings(with_stated_warm_start(method, burned), learning_rate, burn_in)
    if needs.learning_rate == "given" and needs.adapts_step:
        warmed = with_stated_warm_start(method, burned)
        if burned > warmed.num_warm_start_steps:  # the other updates of burn-in adapt the step size
            return EnergySettings(warmed, FIRST_STEP, burn_in)
    if needs.learning_rate == "whitening":
        method = _whitened(method, burn_in, dim)
    chosen = choose_settings(method, num_steps, burn_in=burned)
    if chosen.adamw_steps:
        chosen = chosen.with_found(find_rate(chosen.adamw_steps))
    if needs.learning_rate == "whitening":  # chosen together with the warm start
        assert chosen.method.burn_in is not None
        burn_in = chosen.method.burn_in
    return EnergySettings(chosen.method, chosen.learning_rate, burn_in)


def _whitened(method: MethodConfig, burn_in: float, dim: int) -> MethodConfig:
    """Return the config of a sampler of d parameters in whitened coordinates, with the burn-in that was given."""
    given = method.requirements.whitening
    if given == "kronecker":
        raise ValueError(
            f"{method.name}: whitening='kronecker' is made of the inputs and outputs of modules, which an energy does "
            "not have: leave it out"
        )
    structure = given or ("full" if dim <= MAX_DENSE else "diagonal")
    return replace(with_whitening(method, structure), burn_in=burn_in or None)


def try_rates(
    objective: Objective,
    start: Tensor,
    problem: Problem,
    updates: Iterator[list[Any]],
    *,
    num_steps: int,
    prior_weight: float,
) -> float:
    """Try ``RATES`` and return a learning rate for ``num_steps`` updates of AdamW.

    The trial of a model, ``objectives.range_test``, cannot replace this one. There each member has a rate of its own,
    all members begin at the same weights, and a member that is not finite is left out. Here each chain has a starting
    point of its own, and an energy that raises has no value for any chain, so each rate needs a run of its own. A model
    also keeps a usual rate unless another one is clearly better, but energies have no usual rate.

    Args:
        objective: the energy.
        start: [M, d] where the chains begin.
        problem: a run of the same energy.
        updates: the batches of each update.
        num_steps: N, the updates that AdamW makes in the run.
        prior_weight: the weight of the prior in the energy, see ``MethodConfig.prior_weight``.
    Raises:
        FloatingPointError: if the energy is not finite at the start, or in an update of every rate. In the same cases,
            an exception by which the energy refuses a point outside its support is raised as it is.
    """
    count = min(MAX_UPDATES, max(MIN_UPDATES, int(TRIAL_SHARE * problem.num_steps) // len(RATES)))
    batches = list(itertools.islice(updates, count))
    found: dict[float, float] = {}
    failure: Exception | None = None
    for rate in RATES:
        rule = adamw_rule(problem, prior_weight=prior_weight, rates=start.new_full((len(start),), rate))
        run = Run(rule, objective, start.clone(), (), problem)
        try:
            energies = [run.update(each, 1 - step / count).info["energy"] for step, each in enumerate(batches)]
        except Exception as error:
            if run.num_updates == 0 or not is_outside_support(error):  # no fault of the rate
                raise
            failure = failure or error
            continue
        found[rate] = float(last_third(energies).double().mean())
    if failure is not None and not found:
        failure.add_note(
            f"at learning rate {RATES[0]:g}, the smallest that was tried because none was given; the larger ones "
            "failed, too. Give a smaller learning_rate, or look at the energy there"
        )
        raise failure
    return best_rate(found) * math.sqrt(min(1.0, count / num_steps))
