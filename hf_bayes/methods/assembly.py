"""The method of a run, put together from its config: ladder, warm start, whitening, schedule, and generators."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_bayes.core.config import MethodConfig, check_schedules
from hf_bayes.core.number_checks import is_finite_number
from hf_bayes.core.requirements import WhiteningStructure
from hf_bayes.core.rng import chain_generators
from hf_bayes.core.types import Evaluation, Info, Kernel, Problem, Rngs, Rule
from hf_bayes.methods.averaging.map import (
    BETA_1,
    MAPConfig,
    descend,
    rate_of_warm_start,
    warm_start,
    warm_start_kernel,
)
from hf_bayes.methods.ladder import with_ladder
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig
from hf_bayes.methods.sgmcmc.whitening import whiten


def assemble(config: MethodConfig, problem: Problem) -> Rule[Any] | Kernel[Any]:
    """Return the method of a run: the config's own rule or kernel, with ladder, warm start, whitening and schedule.

    Raises:
        ValueError: if the method cannot run on it.
    """
    _check(config, problem)
    if isinstance(config, LangevinConfig) and config.ladder is not None:
        return with_ladder(config, problem, assemble)
    steps = config.num_warm_start_steps
    if not steps:
        return _without_warm_start(config, problem)
    # the method's adaptation ends with burn-in, so the method gets a run that begins after the warm start
    after_warm_start = problem._replace(
        num_steps=problem.num_steps - steps,
        burn_in=problem.burn_in - steps,
        draw_steps=_shifted(problem.draw_steps, steps),
    )
    method = _without_warm_start(config, after_warm_start)
    warm: dict[str, Any] = {"steps": steps, "learning_rate": config.adamw_learning_rate, "problem": problem}
    if isinstance(method, Kernel):
        return warm_start_kernel(method, **warm, prior_weight=config.prior_weight)
    return warm_start(method, **warm, prior_weight=config.prior_weight, decays=problem.own_step_size)


def mirrors_chains(config: MethodConfig, problem: Problem) -> bool:
    """Check whether every second chain of a run takes minus the noise of the chain before it."""
    return problem.own_step_size and config.requirements.mirrored_chains


def generators_of(config: MethodConfig, problem: Problem, seed: int, num_chains: int, **options: Any) -> Rngs:
    """Return the generators of a run's chains, in mirrored pairs if the method asks for them.

    Args:
        options: further arguments of ``chain_generators``.
    """
    return chain_generators(seed, num_chains, mirrored=mirrors_chains(config, problem), **options)


def with_whitening(config: MethodConfig, structure: WhiteningStructure) -> MethodConfig:
    """Return the config of a sampler that whitens its coordinates by a curvature of this structure."""
    assert isinstance(config, LangevinConfig)  # as ``Requirements.learning_rate`` says
    return replace(config, whitening=structure)


def with_batch_posterior(config: MethodConfig, batch_fraction: float) -> MethodConfig:
    """Return the config to run and to save when a batch holds the share n / N of the data's rows.

    A likelihood of n terms is the likelihood of all N terms, tempered at T = N / n. The config returned has ``temper``
    and ``temperature`` in place of the setting that asked for it.
    """
    setting = config.requirements.batch_posterior_setting
    if not setting:
        return config
    tempered: dict[str, Any] = {setting: False, "temper": "likelihood", "temperature": 1 / batch_fraction}
    return replace(config, **tempered)


def adamw_rule(problem: Problem, *, prior_weight: float = 1.0, rates: Tensor | None = None) -> Rule[Any]:
    """Return AdamW on U_lik + w U_prior, the energy of a method whose ``prior_weight`` is w.

    Args:
        rates: [M] a learning rate for each member, of which the learning rate of an update is then a factor.
    """
    factor = 1.0 if rates is None else rates[:, None]

    def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        return descend(state, evaluation, problem, lr * factor, momentum=BETA_1, prior_weight=prior_weight)

    return MAPConfig().build(problem)._replace(update=update)


def rate_factor(config: MethodConfig, step: int, draw_steps: range) -> float:
    """Return l_t / l_0 of update ``step`` (from 0), in (0, 1]; 1 in a warm start, which has its own learning rate."""
    begin = config.num_warm_start_steps
    if config.schedule is None or step < begin:
        return 1.0
    return config.schedule.learning_rate(step - begin, _shifted(draw_steps, begin))


def warm_start_rate(config: MethodConfig, problem: Problem, step: int) -> float | None:
    """Return the learning rate of AdamW in update ``step``, from 0; None after the warm start."""
    steps = config.num_warm_start_steps
    if step >= steps:
        return None
    return rate_of_warm_start(config.adamw_learning_rate, step, steps, decays=problem.own_step_size)


def _shifted(draw_steps: range, begin: int) -> range:
    """Return the draw steps, counted from update ``begin``."""
    return range(draw_steps.start - begin, draw_steps.stop - begin, draw_steps.step)


def _without_warm_start(config: MethodConfig, problem: Problem) -> Rule[Any] | Kernel[Any]:
    """Return the method with its whitening or its schedule."""
    if problem.own_step_size and isinstance(config, LangevinConfig):
        return whiten(config, problem, config.build)
    method, schedule, draws = config.build(problem), config.schedule, problem.draw_steps
    if schedule is None:
        return method
    schedule.check(draws)
    assert isinstance(method, Rule)  # check_schedules: a kernel follows none
    if not schedule.has_ramp:
        return method
    try:
        replace(config, temperature=0.0)
    except ValueError as error:
        raise ValueError(f"schedule {schedule.name!r} starts its cycles at T = 0, but {error}") from error

    def rule_at(step: int) -> Rule[Any]:
        ratio = schedule.temperature(step, draws)
        rule = replace(config, temperature=config.temperature * ratio).build(problem)
        assert isinstance(rule, Rule)
        return rule

    def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
        step = int(state.step[0])  # all chains have done the same number of updates
        return rule_at(step).update(state, evaluation, lr, rngs)

    return method._replace(init=rule_at(0).init, update=update)


def _check(config: MethodConfig, problem: Problem) -> None:
    check_schedules(config)
    for field in ("num_data", "learning_rate"):
        value = getattr(problem, field)
        if not is_finite_number(value) or value <= 0:
            raise ValueError(f"{config.name}: {field} must be a finite number > 0, got {value!r}")
    if config.num_warm_start_steps > problem.burn_in:
        raise ValueError(
            f"{config.name}: warm_start_steps={config.num_warm_start_steps} count as burn-in, which is "
            f"{problem.burn_in} of {problem.num_steps} updates: raise burn_in or lower warm_start_steps"
        )
    if config.temperature == 0 and type(config).temperature != 0:  # an optimiser's own default is T = 0
        goal = "posterior" if config.temper == "posterior" else "likelihood"
        warnings.warn(
            f"{config.name} at temperature 0 maximises the {goal}: its draws are no posterior samples",
            stacklevel=3,
        )
