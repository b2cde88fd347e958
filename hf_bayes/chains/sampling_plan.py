"""The plan of ``sample``: checks of its arguments, and starting points, draws and step sizes of the run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig, check_config
from hf_bayes.core.number_checks import is_count, is_finite_number, is_integral
from hf_bayes.core.rng import generator, randn
from hf_bayes.core.schedules import burn_in_steps
from hf_bayes.core.types import UNNAMED, Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.registry import rate_factor

Energy = Callable[[Tensor, Any], Tensor]
"""(theta [M, d], batch) -> U [M] in nats, batch None when ``batches`` is None."""

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def check_arguments(
    energy: Energy,
    method: MethodConfig,
    batches: Batches | None,
    batches_per_step: int,
    batch_fraction: float | None,
    seed: Any,
) -> None:
    """Check the arguments of ``sample`` that do not depend on the number of updates.

    Raises:
        ValueError: naming the first argument that cannot be used.
    """
    check_energy(energy)
    check_method(method, batches)
    check_seed(seed)
    check_batches(method, batches, batches_per_step, batch_fraction)


def problem_of(
    method: MethodConfig,
    learning_rate: float | Callable[[int], float],
    *,
    dim: int,
    num_data: float,
    num_steps: int,
    burn_in: float,
    thin: int,
    batch_fraction: float | None,
) -> tuple[Problem, list[float]]:
    """Return the problem of a run on theta [M, ``dim``], and the step size of each update.

    Raises:
        ValueError: for numbers of updates or step sizes that cannot be run.
    """
    burned = burn_in_of(burn_in, num_steps)
    draw_steps = draw_steps_of(num_steps, burned, thin)
    rates = rates_of(learning_rate, num_steps, method, draw_steps)
    problem = Problem(
        num_data=num_data,
        prior=FlatPrior(),
        learning_rate=max(rates),
        num_steps=num_steps,
        burn_in=burned,
        shapes={UNNAMED: (dim,)},
        draw_steps=draw_steps,
        batch_fraction=batch_fraction,
    )
    return problem, rates


def check_seed(seed: Any) -> None:
    """Raise unless equal seeds are equal numbers."""
    if not is_integral(seed):
        raise ValueError(f"seed must be an integer, got {seed!r}: equal seeds give equal draws")


def check_method(method: MethodConfig, batches: Batches | None) -> None:
    """Refuse settings of the config that ``sample`` would have to ignore."""
    check_config(method)
    none = {"prior": "gaussian", "prior_std": None, "prior_mean": "zero"}
    setting = next((name for name, default in none.items() if getattr(method, name) != default), None)
    if setting is not None:
        raise ValueError(
            f"sample adds no prior, but {method.name} sets {setting}={getattr(method, setting)!r}: put -log p(theta) "
            f"into the energy and leave {setting} out"
        )
    needs = method.requirements
    if needs.compares_chains:
        raise ValueError(
            f"{needs.heldout_setting} of {method.name} needs held-out rows, which sample does not have: use "
            "BayesianTrainer, or leave it out"
        )
    if needs.gradient_variance == "needed":
        raise ValueError(
            f"sample takes one gradient per update and cannot measure its noise, which {method.name} needs for "
            f"{needs.gradient_variance_setting}: use BayesianTrainer with gradient_accumulation_steps >= 2, or leave "
            "it out"
        )
    if method.temper != "posterior":
        raise ValueError(
            f"sample cannot separate the prior from the rest of the energy, so it cannot leave it untempered: got "
            f"temper={method.temper!r}, expected 'posterior'. Scale the two parts inside the energy instead"
        )
    defaults = {field.name: field.default for field in fields(method)}
    for name in ("burn_in", "thin", "draws_per_chain"):
        if getattr(method, name) != defaults[name]:
            raise ValueError(
                f"sample takes burn_in and thin as its own arguments and would ignore {name}="
                f"{getattr(method, name)!r} of {method.name}: leave it out of the config"
            )
    if needs.tensor_names_setting:
        raise ValueError(
            f"sample's theta is one tensor without a name, but {method.name} sets {needs.tensor_names_setting}, which "
            "selects tensors by name: leave it out, or use BayesianTrainer"
        )
    if needs.tensor_scales_setting:
        warnings.warn(
            f"{needs.tensor_scales_setting} of {method.name} scales each tensor relative to the others, and sample's "
            "theta is one tensor: its scale is 1, and the updates that measure it do not move theta. Leave it out",
            stacklevel=4,
        )
    if needs.all_data_in_every_update and batches is not None:
        raise ValueError(
            f"{method.name} is exact only if every energy sees all data, got batches: leave batches=None and let the "
            "energy hold the data"
        )


def check_energy(energy: Energy) -> None:
    """Raise for what cannot be called with theta and a batch."""
    if not callable(energy):
        raise ValueError(f"energy must be a function of (theta, batch), got {energy!r:.100}")
    try:
        signature = inspect.signature(energy)
    except (TypeError, ValueError):  # written in another language
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"energy is called as energy(theta, batch), batch None where no batches are given; got a function of "
            f"{signature} ({error}): give it a second argument"
        ) from None


def check_batches(
    method: MethodConfig, batches: Batches | None, batches_per_step: int, batch_fraction: float | None
) -> None:
    """Raise for numbers of batches with which the method, or any method, cannot run."""
    if not is_count(batches_per_step):
        raise ValueError(f"batches_per_step must be an integer >= 1, got {batches_per_step!r}")
    if batches is None and batches_per_step > 1:
        raise ValueError(f"batches_per_step={batches_per_step} needs batches, got None")
    if batch_fraction is not None and not (_positive(batch_fraction) and batch_fraction <= 1):
        raise ValueError(f"batch_fraction must be a number in (0, 1], got {batch_fraction!r}")
    least = method.requirements.min_batches
    if batches_per_step < least:
        raise ValueError(
            f"{method.name} needs at least {least} batches per update to estimate their variance, got "
            f"batches_per_step={batches_per_step}: raise it"
        )


def starting_points(theta: Tensor, method: MethodConfig, seed: int) -> Tensor:
    """Return the starting points of the chains [M, d], a fresh tensor."""
    if not isinstance(theta, Tensor):
        raise ValueError(f"theta must be a tensor [M, d] or [d], got {type(theta).__name__}: torch.tensor makes one")
    if theta.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"theta must be float32 or float64, got {theta.dtype}: lower precision rounds the noise of an update away"
        )
    if theta.ndim not in (1, 2) or theta.numel() == 0:
        raise ValueError(f"theta must be [M, d] or [d] with at least one element, got shape {list(theta.shape)}")
    theta = theta.detach()
    if theta.ndim == 2:
        default = {field.name: field.default for field in fields(method)}["num_chains"]
        if method.num_chains not in (len(theta), default):
            warnings.warn(
                f"theta has {len(theta)} rows, each the start of a chain, so num_chains={method.num_chains} of "
                f"{method.name} is not used: leave it out, or give one start [d]",
                stacklevel=3,
            )
        points = theta.clone(memory_format=torch.contiguous_format)
    else:
        centre = theta.expand(method.num_chains, -1)
        scale = theta.square().mean().sqrt().item() or 0.01
        rngs = [generator(seed, "init", chain, device=theta.device) for chain in range(method.num_chains)]
        points = centre + method.init_jitter * scale * randn(rngs, centre)
    if not bool(torch.isfinite(points).all()):
        raise ValueError("theta has non-finite elements: chains must start at finite points")
    return points


def rates_of(
    learning_rate: float | Callable[[int], float], num_steps: int, method: MethodConfig, draw_steps: range
) -> list[float]:
    """Return the step size of each update."""
    if not callable(learning_rate):
        if not _positive(learning_rate):
            raise ValueError(f"learning_rate must be a finite number > 0, got {learning_rate!r}")
        return [learning_rate * rate_factor(method, step, draw_steps) for step in range(num_steps)]
    if method.schedule is not None:
        raise ValueError(
            f"learning_rate must be a number, the peak, under schedule={method.schedule.name!r} of {method.name}; got "
            f"{learning_rate!r}: leave one of the two schedules out"
        )
    rates = [learning_rate(step) for step in range(num_steps)]
    for step, rate in enumerate(rates):
        if not _positive(rate):
            raise ValueError(
                f"learning_rate must be > 0 at every step, the schedule gives {rate!r} at step {step} (of 0 to "
                f"{num_steps - 1}): end it earlier or give it a floor"
            )
    return [float(rate) for rate in rates]


def _positive(value: Any) -> bool:
    return is_finite_number(value) and bool(value > 0)


def burn_in_of(burn_in: float, num_steps: int) -> int:
    """Return the number of updates before the first draw."""
    if not is_count(num_steps):
        raise ValueError(f"num_steps must be an integer >= 1, got {num_steps!r}")
    if not is_finite_number(burn_in) or burn_in < 0 or (burn_in >= 1 and burn_in % 1 != 0):
        raise ValueError(f"burn_in must be a fraction in [0, 1) or a number of updates, got {burn_in!r}")
    return burn_in_steps(burn_in, num_steps)


def draw_steps_of(num_steps: int, burn_in: int, thin: int) -> range:
    """Return the updates, counted from 1, after which draws are taken."""
    if not is_count(thin):
        raise ValueError(f"thin must be an integer >= 1, got {thin!r}")
    draw_steps = range(burn_in + thin, num_steps + 1, thin)
    if not draw_steps:
        raise ValueError(
            f"would collect 0 draws: {num_steps} updates, the first {burn_in} of them burn-in, one draw per {thin}. "
            "Raise num_steps or lower burn_in or thin"
        )
    return draw_steps
