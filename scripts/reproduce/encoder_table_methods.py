"""The methods of ``encoder_table``, each with a grid of its settings."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_bayes import (
    AGPSConfig,
    BayesianTrainingArguments,
    BLoBConfig,
    EnsembleConfig,
    LaplaceConfig,
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
        probe_steps: updates between two values of the probe. R-hat of chains with one draw each is computed from it.
    """

    config: Callable[..., MethodConfig]
    grid: Mapping[str, Sequence[Any]]
    readings: Mapping[str, str | None]
    serial: bool = True
    accumulation: int = 1
    probe_steps: int = BayesianTrainingArguments.probe_steps


def prior(std: float) -> dict[str, float]:
    """Return the prior: ``std`` for the classifier's weights, and 0.1 for A and for B of LoRA."""
    return {"lora_": 0.1, "classifier": std}


def methods(scale: Scale) -> dict[str, Method]:
    """Return all methods in the order of the table. A long chain begins with as many updates of AdamW as MAP has."""
    members, start = scale.members, scale.updates
    warm: dict[str, Any] = {"warm_start_steps": start, "warm_start_learning_rate": 3e-3, "burn_in": 0.3}
    chain: dict[str, Any] = {"num_chains": 1, "draws_per_chain": members, **warm}
    short: dict[str, Any] = {**warm, "warm_start_steps": start // 2, "burn_in": 0.5}
    stds, wide, narrow = (0.1, 0.3, 1.0), (0.3, 1.0), (0.1, 0.3)

    def laplace(structure: str, num_chains: int = 1) -> Callable[..., MethodConfig]:
        jitter = MAPConfig.init_jitter if num_chains == 1 else EnsembleConfig.init_jitter
        return lambda std: LaplaceConfig(
            structure=structure, num_chains=num_chains, init_jitter=jitter, prior_std=prior(std)
        )

    def links(name: str) -> dict[str, str | None]:
        return {f"{name}, members": None, f"{name}, GLM": "monte_carlo", f"{name}, probit": "probit"}

    def agps(max_std: float, std: float, draws: int = members) -> MethodConfig:
        return AGPSConfig(prior_std=prior(std), max_std=max_std, **{**chain, "draws_per_chain": draws})

    return {
        "map": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3, 1e-2), "std": stds}, {"MAP": None}, serial=False,
        ),
        "map_long": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3), "std": wide}, {f"MAP, {members} times the updates": None},
        ),
        "ensemble": Method(
            lambda std: EnsembleConfig(num_chains=members, prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": stds}, {"deep ensemble": None}, serial=False,
        ),
        "sghmc_parallel": Method(
            lambda std: SGHMCConfig(num_chains=members, prior_std=prior(std), **short),
            {"learning_rate": (3e-3, 1e-2), "std": narrow}, {"SGHMC, parallel chains": None}, serial=False,
            probe_steps=max(1, start // 20),
        ),
        "sghmc_serial": Method(
            lambda std: SGHMCConfig(prior_std=prior(std), **chain),
            {"learning_rate": (3e-3, 1e-2), "std": stds}, {"SGHMC, one chain": None},
        ),
        "mean_field": Method(
            lambda std: MeanFieldConfig(prior_std=prior(std), num_draws=1, **warm),
            {"learning_rate": (1e-3, 3e-3), "std": narrow}, {"mean-field VI": None},
        ),
        "laplace_diagonal": Method(
            laplace("diagonal"), {"learning_rate": (3e-3,), "std": stds}, links("Laplace, diagonal"), serial=False
        ),
        "laplace_kronecker": Method(
            laplace("kronecker"), {"learning_rate": (3e-3,), "std": stds}, links("Laplace, K-FAC"), serial=False
        ),
        "laplace_mixture": Method(
            laplace("kronecker", members // 2), {"learning_rate": (3e-3,), "std": wide},
            {
                f"Laplace, K-FAC, over {members // 2} MAPs, members": None,
                f"Laplace, K-FAC, over {members // 2} MAPs, GLM": "monte_carlo",
            },
            serial=False,
        ),
        "swa": Method(
            lambda std: SWAConfig(prior_std=prior(std), optimizer="sgd", **warm),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"SWA": None},
        ),
        "swag": Method(
            lambda std: SWAGConfig(prior_std=prior(std), optimizer="sgd", **warm),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"SWAG": None},
        ),
        "sgd_mc": Method(
            lambda std: SGDMCConfig(prior_std=prior(std), **chain),
            {"learning_rate": (3e-2, 1e-1), "std": wide}, {"SGD-MC": None},
        ),
        "mc_dropout": Method(
            lambda dropout, std: MCDropoutConfig(prior_std=prior(std), dropout=dropout, num_masks=members),
            {"learning_rate": (3e-3,), "dropout": (0.1, 0.3), "std": wide}, {"MC dropout": None}, serial=False,
        ),
        "snapshot": Method(
            lambda std: SnapshotConfig(prior_std=prior(std), draws_per_chain=members),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"snapshot ensemble": None},
        ),
        "sghmc_cyclical": Method(
            lambda std: SGHMCConfig(
                prior_std=prior(std), preconditioner="layerwise", preconditioner_batches=16,
                schedule=Cyclical(ramp_up=0.2), **{**chain, "burn_in": 0.0},
            ),
            {"learning_rate": (3e-2, 1e-1), "std": narrow}, {"SGHMC, cyclical, preconditioned": None},
        ),
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
            lambda std: PenaltyConfig(prior_std=prior(std), num_leapfrog=1, **chain),
            {"learning_rate": (1e-4, 1e-3), "std": (0.3,)}, {"penalty": None}, accumulation=4,
        ),
        "blob": Method(
            lambda std: BLoBConfig(prior_std=prior(std), **warm),
            {"learning_rate": (1e-3, 3e-3), "std": narrow}, {"BLoB": None},
        ),
        "training_free": Method(
            lambda std: TrainingFreeConfig(prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": stds}, {"training-free, of MAP": None}, serial=False,
        ),
    }  # fmt: skip


def points(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return all points of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def settings(method: Method) -> dict[str, Any]:
    """Return the settings that all runs of a method share: its config at the grid's first point, and its budget."""
    config = at_first_point(method)
    usual = type(config)().to_dict()
    chosen = {name: value for name, value in config.to_dict().items() if name == "name" or value != usual[name]}
    found = {"method": chosen, "serial": method.serial, "accumulation": method.accumulation}
    return json.loads(json.dumps(found))


def at_first_point(method: Method) -> MethodConfig:
    """Return the config at the first point of the grid."""
    return method.config(**{name: values[0] for name, values in method.grid.items() if name != "learning_rate"})
