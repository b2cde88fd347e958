"""The plan of ``sample``: checks of its arguments, and starting points, draws and step sizes of the run."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.theta_form import Energy, Form
from hf_bayes.core.config import MethodConfig, check_config, check_schedules
from hf_bayes.core.number_checks import is_count, is_finite_number, is_integral
from hf_bayes.core.rng import generator, randn
from hf_bayes.core.schedules import burn_in_steps
from hf_bayes.core.types import Prior, Problem
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior
from hf_bayes.methods.assembly import rate_factor

PriorOfTheta = Prior | float | Mapping[str, float]
"""A prior that the energy does not include: a density, or the std of N(0, std^2), for all of theta or by name."""

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def check_arguments(
    energy: Energy[Any],
    method: MethodConfig,
    prior: PriorOfTheta | None,
    batches: Batches | None,
    batches_per_step: int,
    batch_fraction: float | None,
    seed: Any,
    *,
    learning_rate: float | Callable[[int], float] | None,
) -> None:
    """Check the arguments of ``sample`` that do not depend on the number of updates.

    Raises:
        ValueError: naming the first argument that cannot be used.
    """
    check_energy(energy)
    check_method(method, batches, has_prior=prior is not None)
    check_schedules(method, "a function as learning_rate" if callable(learning_rate) else None)
    check_seed(seed)
    check_batches(method, batches, batches_per_step, batch_fraction, own_rate=learning_rate is None)


def problem_of(
    method: MethodConfig,
    learning_rate: float | Callable[[int], float] | None,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    prior: Prior,
    num_data: float,
    num_steps: int,
    burn_in: float,
    thin: int,
    batch_fraction: float | None,
    update_fraction: float | None = None,
) -> tuple[Problem, list[float]]:
    """Return the problem of a run on theta of these shapes, and the step size of each update.

    Without a learning rate the method finds a step size of its own; the rates are then factors of it.

    Raises:
        ValueError: for numbers of updates or step sizes that cannot be run.
    """
    own = learning_rate is None
    burned = burn_in_of(burn_in, num_steps)
    draw_steps = draw_steps_of(num_steps, burned, thin)
    rates = rates_of(1.0 if learning_rate is None else learning_rate, num_steps, method, draw_steps)
    problem = Problem(
        num_data=num_data,
        prior=prior,
        learning_rate=1.0 if own else max(rates),
        num_steps=num_steps,
        burn_in=burned,
        shapes=shapes,
        draw_steps=draw_steps,
        batch_fraction=batch_fraction,
        update_fraction=update_fraction,
        own_step_size=own,
    )
    return problem, rates


def check_seed(seed: Any) -> None:
    """Raise a ValueError unless ``seed`` is an integer."""
    if not is_integral(seed):
        raise ValueError(f"seed must be an integer, got {seed!r}: equal seeds give equal draws")


def prior_of(prior: PriorOfTheta | None, form: Form[Any], like: Tensor) -> Prior:
    """Return the prior of theta, in the dtype of ``like`` [d]; flat if the energy includes it.

    Raises:
        ValueError: for an object that is no density of theta, or standard deviations that are not positive or belong to
            no tensor.
    """
    if prior is None:
        return FlatPrior()
    if isinstance(prior, Mapping):
        layout = form.layout
        if layout is None or set(prior) != set(layout.names):
            names = "theta is one tensor without names" if layout is None else f"expected {list(layout.names)}"
            raise ValueError(f"prior must name each tensor of theta once, got {list(prior)}: {names}")
        pairs = zip(layout.names, layout.sizes, strict=True)
        stds = torch.cat([_std_of(prior[name]).expand(size) for name, size in pairs])
        return GaussianPrior(torch.zeros(()), stds).to(like)
    if isinstance(prior, int | float):
        return GaussianPrior(torch.zeros(()), _std_of(prior)).to(like)
    if not all(hasattr(prior, name) for name in ("log_prob", "grad", "to")):
        _std_of(prior)
    fitted = prior.to(like)
    _check_density(fitted, like)
    return fitted


def _check_density(prior: Prior, like: Tensor) -> None:
    """Check that a prior is a density of theta, at its row ``like`` [d]."""
    what = f"prior must be a density of theta, log_prob [M, {len(like)}] -> [M]"
    try:
        shape = list(prior.log_prob(like[None]).shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{what}, and failed at the start of a chain: {error}") from error
    if shape != [1]:
        raise ValueError(f"{what}, got {shape} for one row: sum over the elements of a row")


def _std_of(value: Any) -> Tensor:
    if not _positive(value):
        raise ValueError(
            "prior must be a density with log_prob, grad and to, or a standard deviation > 0 (of all of theta, or by "
            f"name); got {value!r:.100}"
        )
    return torch.tensor(float(value), dtype=torch.float64)


def check_method(method: MethodConfig, batches: Batches | None, *, has_prior: bool = False) -> None:
    """Refuse settings of the config that ``sample`` would have to ignore."""
    check_config(method)
    for setting, value in method.given_prior.items():
        raise ValueError(
            f"sample adds no prior, but {method.name} sets {setting}={value!r}: put -log p(theta) into the energy, or "
            f"give prior=, and leave {setting} out"
        )
    needs = method.requirements
    if needs.compares_chains or needs.heldout_setting:
        raise ValueError(
            f"{needs.heldout_setting} of {method.name} needs held-out rows, which sample does not have: use "
            "BayesianTrainer, or leave it out"
        )
    if method.temper != "posterior" and not has_prior:
        raise ValueError(
            f"sample cannot separate the prior from the rest of the energy, so it cannot leave it untempered: got "
            f"temper={method.temper!r}, expected 'posterior'. Give prior=, and leave -log p(theta) out of the energy"
        )
    defaults = {field.name: field.default for field in fields(method)}
    for name in ("burn_in", "thin", "draws_per_chain"):
        if getattr(method, name) != defaults[name]:
            raise ValueError(
                f"sample takes burn_in and thin as its own arguments and would ignore {name}="
                f"{getattr(method, name)!r} of {method.name}: leave it out of the config"
            )
    if needs.all_data_in_every_update and batches is not None:
        raise ValueError(
            f"{method.name} is exact only if every energy sees all data, got batches: leave batches=None and let the "
            "energy hold the data"
        )


def check_energy(energy: Energy[Any]) -> None:
    """Raise a ValueError if ``energy`` cannot be called as energy(theta, batch)."""
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
    method: MethodConfig,
    batches: Batches | None,
    batches_per_step: int,
    batch_fraction: float | None,
    *,
    own_rate: bool = False,
) -> None:
    """Raise a ValueError if the method cannot run with these batches."""
    if not is_count(batches_per_step):
        raise ValueError(f"batches_per_step must be an integer >= 1, got {batches_per_step!r}")
    if batches is None and batches_per_step > 1:
        raise ValueError(f"batches_per_step={batches_per_step} needs batches, got None")
    if batch_fraction is not None and not (_positive(batch_fraction) and batch_fraction <= 1):
        raise ValueError(f"batch_fraction must be a number in (0, 1], got {batch_fraction!r}")
    needs = method.requirements
    if needs.gradient_variance == "needed" and batches_per_step < 2:
        raise ValueError(
            f"{method.name} needs the variance of the gradient for {needs.gradient_variance_setting}, which sample "
            f"estimates from several batches of an update, got batches_per_step={batches_per_step}: give "
            "batches_per_step >= 2 (and batches), or leave it out"
        )
    passes = needs.final_pass or (own_rate and needs.learning_rate in ("whitening", "range_test"))
    if passes and batches is not None and not callable(batches) and not isinstance(batches, Sized):
        raise ValueError(
            f"{method.name} passes over the data more than once, and batches can be read only once, got "
            f"{type(batches).__name__}: pass a list, a DataLoader, or a function that returns a fresh iterator"
        )
    least = needs.min_batches
    if batches_per_step < least:
        raise ValueError(
            f"{method.name} needs at least {least} batches per update to estimate their variance, got "
            f"batches_per_step={batches_per_step}: raise it"
        )


def check_names(method: MethodConfig, form: Form[Any]) -> None:
    """Refuse settings that select tensors by name, and warn of settings that scale tensors, if theta is one tensor."""
    needs = method.requirements
    if form.layout is not None:
        return
    if needs.tensor_names_setting:
        raise ValueError(
            f"sample's theta is one tensor without a name, but {method.name} sets {needs.tensor_names_setting}, which "
            "selects tensors by name: leave it out, or give theta as a dictionary of tensors"
        )
    if needs.tensor_scales_setting:
        warnings.warn(
            f"{needs.tensor_scales_setting} of {method.name} scales each tensor relative to the others, and sample's "
            "theta is one tensor: its scale is 1, and the updates that measure it do not move theta. Leave it out, or "
            "give theta as a dictionary of tensors",
            stacklevel=3,
        )


def check_state(method: MethodConfig) -> None:
    """Refuse a given state where a warm start comes before the method."""
    if method.num_warm_start_steps:
        raise ValueError(
            f"state= is what chains of {method.name} begin with, and warm_start_steps={method.num_warm_start_steps} "
            "come before that: leave one of the two out"
        )


def one_pass(batches: Batches | None, most: int) -> Callable[[], Iterable[Any]] | None:
    """Return a function that yields the batches of one pass over the data, at most ``most`` of an unknown number."""
    if batches is None:
        return None

    def found() -> Iterable[Any]:
        some = batches() if callable(batches) else batches
        return some if isinstance(some, Sized) else itertools.islice(some, most)

    return found


def update_fraction_of(batches: Batches | None, batches_per_step: int, batch_fraction: float | None) -> float | None:
    """Return the share of the data in one update, if it is known without a pass over the batches."""
    if batch_fraction is None and (callable(batches) or not isinstance(batches, Sized) or not len(batches)):
        return None
    share = 1 / len(batches) if batch_fraction is None else batch_fraction
    return min(1.0, batches_per_step * share)


def starting_points(theta: Tensor, method: MethodConfig, seed: int) -> Tensor:
    """Return the starting points of the chains [M, d], a fresh tensor."""
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
