"""The methods of ``encoder_table``, each with a grid of its settings."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_bayes import (
    AGPSConfig,
    BayesianTrainingArguments,
    BLoBConfig,
    EKFConfig,
    EnsembleConfig,
    IVONConfig,
    LaplaceConfig,
    LowRankVIConfig,
    MAPConfig,
    MCDropoutConfig,
    MeanFieldConfig,
    PenaltyConfig,
    SGDMCConfig,
    SGHMCConfig,
    SnapshotConfig,
    SWAConfig,
    SWAGConfig,
    TrainingFreeConfig,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Cyclical

Choice = dict[str, Any]
"""A point of a method's grid."""


class Scale(NamedTuple):
    """The sizes of the experiment."""

    rows: Mapping[str, int] = {"train": 1000, "validation": 500, "test": 1000, "ood": 1000}
    updates: int = 200
    """The updates of the MAP estimate. Methods of several members take ``members`` times as many gradients."""
    members: int = 8
    seeds: int = 3
    tokens: int = 16
    batch_size: int = 32
    rank: int = 8


class Method(NamedTuple):
    """A method in the table. One run may give several rows.

    Attributes:
        config: the method at a point of its grid.
        grid: values of each of its settings. ``learning_rate`` belongs to the trainer.
        serial: True if one chain takes all gradients.
        readings: row of the table -> link of ``linearise``. None predicts by members.
        accumulation: number of parts of a batch.
        passes: number of passes over the rows with one row in each update, as in a stream. 0: updates have batches.
        probe_steps: updates between two values of the probe. R-hat of chains with one draw each is computed from it.
    """

    config: Callable[..., MethodConfig]
    grid: Mapping[str, Sequence[Any]]
    readings: Mapping[str, str | None]
    serial: bool = True
    accumulation: int = 1
    passes: int = 0
    probe_steps: int = BayesianTrainingArguments.probe_steps


def prior(std: float) -> dict[str, float]:
    """Return the prior: ``std`` for the classifier's weights, and 0.1 for A and for B of LoRA."""
    return {"lora_": 0.1, "classifier": std}


STDS, WIDE, NARROW = (0.1, 0.3, 1.0), (0.3, 1.0), (0.1, 0.3)
"""Grids of the prior's standard deviation of the classifier's weights."""


def methods(scale: Scale) -> dict[str, Method]:
    """Return all methods in the order of the table. A long chain begins with as many updates of AdamW as MAP has."""
    return {
        **optimisers(scale),
        **stochastic_gradients(scale),
        **variational(scale),
        **filters(),
        **laplace(scale),
        **averages(scale),
        **restarts(scale),
        **metropolis(scale),
        **lora_gaussians(scale),
    }


def warm(scale: Scale) -> dict[str, Any]:
    """Return the settings of a run that begins with the updates of the MAP estimate."""
    return {"warm_start_steps": scale.updates, "warm_start_learning_rate": 3e-3, "burn_in": 0.3}


def chain(scale: Scale) -> dict[str, Any]:
    """Return the settings of one long chain."""
    return {"num_chains": 1, "draws_per_chain": scale.members, **warm(scale)}


def optimisers(scale: Scale) -> dict[str, Method]:
    """Return the methods that minimise the energy."""
    return {
        "map": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3, 1e-2), "std": STDS}, {"MAP": None}, serial=False,
        ),
        "map_long": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3), "std": WIDE}, {f"MAP, {scale.members} times the updates": None},
        ),
        "ensemble": Method(
            lambda std: EnsembleConfig(num_chains=scale.members, prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": STDS}, {"deep ensemble": None}, serial=False,
        ),
    }  # fmt: skip


def stochastic_gradients(scale: Scale) -> dict[str, Method]:
    """Return SGHMC with a constant step size, in parallel chains and in one chain."""
    short = {**warm(scale), "warm_start_steps": scale.updates // 2, "burn_in": 0.5}
    return {
        "sghmc_parallel": Method(
            lambda std: SGHMCConfig(num_chains=scale.members, prior_std=prior(std), **short),
            {"learning_rate": (3e-3, 1e-2), "std": NARROW}, {"SGHMC, parallel chains": None}, serial=False,
            probe_steps=max(1, scale.updates // 20),
        ),
        "sghmc_serial": Method(
            lambda std: SGHMCConfig(prior_std=prior(std), **chain(scale)),
            {"learning_rate": (3e-3, 1e-2), "std": STDS}, {"SGHMC, one chain": None},
        ),
    }  # fmt: skip


def variational(scale: Scale) -> dict[str, Method]:
    """Return variational inference from single gradients, and from pairs at half as many updates (the default)."""
    grid: dict[str, Sequence[Any]] = {"learning_rate": (1e-3, 3e-3), "std": NARROW}
    return {
        "mean_field": Method(
            lambda std: MeanFieldConfig(prior_std=prior(std), num_draws=1, **warm(scale)),
            grid, {"mean-field VI": None},
        ),
        "mean_field_pairs": Method(
            lambda std: MeanFieldConfig(prior_std=prior(std), **warm(scale)), grid, {"mean-field VI, pairs": None}
        ),
        "low_rank_pairs": Method(
            lambda std: LowRankVIConfig(prior_std=prior(std), **warm(scale)), grid, {"low-rank VI, pairs": None}
        ),
        "ivon": Method(
            lambda std: IVONConfig(prior_std=prior(std), **warm(scale)),
            {"learning_rate": (0.003, 0.01, 0.03), "std": NARROW}, {"IVON": None},  # of Newton's step
        ),
    }  # fmt: skip


def filters(passes: int = 8) -> dict[str, Method]:
    """Return the extended Kalman filter: in one pass, and on a data set that has every row several times.

    At T = ``passes`` on such a data set every row counts once in total.
    """

    def config(std: float, temperature: float = 1.0) -> MethodConfig:
        return EKFConfig(prior_std=prior(std), temperature=temperature, temper="likelihood")

    grid: dict[str, Sequence[Any]] = {"learning_rate": (1.0,), "std": (0.03, *STDS)}
    return {
        "ekf": Method(config, grid, {"EKF, one pass": None}, passes=1),
        "ekf_passes": Method(
            functools.partial(config, temperature=float(passes)), grid,
            {f"EKF, {passes} passes, rows count once": None}, passes=passes,
        ),
        "ekf_copies": Method(
            config, grid, {f"EKF, {passes} passes, rows count {passes} times": None}, passes=passes
        ),
    }  # fmt: skip


def laplace(scale: Scale) -> dict[str, Method]:
    """Return the Laplace approximations, each read by members and by the linearised model."""

    def config(structure: str, num_chains: int = 1) -> Callable[..., MethodConfig]:
        jitter = MAPConfig.init_jitter if num_chains == 1 else EnsembleConfig.init_jitter
        return lambda std: LaplaceConfig(
            structure=structure, num_chains=num_chains, init_jitter=jitter, prior_std=prior(std)
        )

    def links(name: str) -> dict[str, str | None]:
        return {f"{name}, members": None, f"{name}, GLM": "monte_carlo", f"{name}, probit": "probit"}

    num_maps = scale.members // 2
    return {
        "laplace_diagonal": Method(
            config("diagonal"), {"learning_rate": (3e-3,), "std": STDS}, links("Laplace, diagonal"), serial=False
        ),
        "laplace_kronecker": Method(
            config("kronecker"), {"learning_rate": (3e-3,), "std": STDS}, links("Laplace, K-FAC"), serial=False
        ),
        "laplace_mixture": Method(
            config("kronecker", num_maps), {"learning_rate": (3e-3,), "std": WIDE},
            {
                f"Laplace, K-FAC, over {num_maps} MAPs, members": None,
                f"Laplace, K-FAC, over {num_maps} MAPs, GLM": "monte_carlo",
            },
            serial=False,
        ),
    }  # fmt: skip


def averages(scale: Scale) -> dict[str, Method]:
    """Return the methods that average, or draw from, the iterates of SGD."""
    return {
        "swa": Method(
            lambda std: SWAConfig(prior_std=prior(std), optimizer="sgd", **warm(scale)),
            {"learning_rate": (1e-2, 3e-2), "std": WIDE}, {"SWA": None},
        ),
        "swag": Method(
            lambda std: SWAGConfig(prior_std=prior(std), optimizer="sgd", **warm(scale)),
            {"learning_rate": (1e-2, 3e-2), "std": WIDE}, {"SWAG": None},
        ),
        "sgd_mc": Method(
            lambda std: SGDMCConfig(prior_std=prior(std), **chain(scale)),
            {"learning_rate": (3e-2, 1e-1), "std": WIDE}, {"SGD-MC": None},
        ),
        "mc_dropout": Method(
            lambda dropout, std: MCDropoutConfig(prior_std=prior(std), dropout=dropout, num_masks=scale.members),
            {"learning_rate": (3e-3,), "dropout": (0.1, 0.3), "std": WIDE}, {"MC dropout": None}, serial=False,
        ),
    }  # fmt: skip


def restarts(scale: Scale) -> dict[str, Method]:
    """Return the methods whose step size goes through cycles."""
    return {
        "snapshot": Method(
            lambda std: SnapshotConfig(prior_std=prior(std), draws_per_chain=scale.members),
            {"learning_rate": (1e-2, 3e-2), "std": WIDE}, {"snapshot ensemble": None},
        ),
        "sghmc_cyclical": Method(
            lambda std: SGHMCConfig(
                prior_std=prior(std), preconditioner="layerwise", preconditioner_batches=16,
                schedule=Cyclical(ramp_up=0.2), **{**chain(scale), "burn_in": 0.0},
            ),
            {"learning_rate": (3e-2, 1e-1), "std": NARROW}, {"SGHMC, cyclical, preconditioned": None},
        ),
    }  # fmt: skip


def metropolis(scale: Scale) -> dict[str, Method]:
    """Return the methods with proposals: a-GPS with its caps, and the penalty method."""

    def agps(max_std: float, std: float, draws: int = scale.members) -> MethodConfig:
        return AGPSConfig(prior_std=prior(std), max_std=max_std, **{**chain(scale), "draws_per_chain": draws})

    return {
        **{
            f"agps_{cap}": Method(
                functools.partial(agps, float(cap)), {"std": (0.3,)}, {f"a-GPS, lambda = {cap}": None}
            )
            for cap in ("1e-2", "1e-3", "1e-4", "1e-5")
        },
        "agps_swag": Method(
            functools.partial(agps, draws=40),
            {"max_std": (1e-2, 1e-3), "std": (0.3,)}, {"SWAG of a-GPS": None},
        ),
        "penalty": Method(
            lambda std: PenaltyConfig(prior_std=prior(std), num_leapfrog=1, **chain(scale)),
            {"learning_rate": (1e-4, 1e-3), "std": (0.3,)}, {"penalty": None}, accumulation=4,
        ),
    }  # fmt: skip


def lora_gaussians(scale: Scale) -> dict[str, Method]:
    """Return the posteriors that are made for LoRA: a random A and a point B."""
    return {
        "blob": Method(
            lambda std: BLoBConfig(prior_std=prior(std), num_draws=1, **warm(scale)),
            {"learning_rate": (1e-3, 3e-3), "std": NARROW}, {"BLoB": None},
        ),
        "training_free": Method(
            lambda std: TrainingFreeConfig(prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": STDS}, {"training-free, of MAP": None}, serial=False,
        ),
    }  # fmt: skip


def points(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return all points of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def num_updates(scale: Scale, method: Method, config: MethodConfig) -> int:
    """Return the updates of a run: pairs of gradients halve the number of a long chain, so that the gradients stay."""
    if method.passes:
        return method.passes * scale.rows["train"]
    return scale.updates * scale.members // config.requirements.gradients_per_update if method.serial else scale.updates


def num_gradients(scale: Scale, method: Method) -> float:
    """Return the number of minibatch gradients of a run."""
    config = at_first_point(method)
    if method.passes:
        return num_updates(scale, method, config) / scale.batch_size
    if not method.serial:
        return scale.updates * config.num_chains
    # an update of the warm start takes one gradient, whatever the method's own updates take
    each, warm = config.requirements.gradients_per_update, config.num_warm_start_steps
    return warm + math.ceil((num_updates(scale, method, config) - warm) * each)


def settings(method: Method) -> dict[str, Any]:
    """Return the settings that all runs of a method share: its config at the grid's first point, and its budget."""
    config = at_first_point(method)
    usual = type(config)().to_dict()
    chosen = {name: value for name, value in config.to_dict().items() if name == "name" or value != usual[name]}
    found = {"method": chosen, "serial": method.serial, "accumulation": method.accumulation}
    if method.passes:
        found["passes"] = method.passes
    return json.loads(json.dumps(found))


def at_first_point(method: Method) -> MethodConfig:
    """Return the config at the first point of the grid."""
    return method.config(**{name: values[0] for name, values in method.grid.items() if name != "learning_rate"})
