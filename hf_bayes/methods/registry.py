"""The registry of all methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig
from hf_bayes.methods.averaging.snapshot import SnapshotConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.methods.variational.blob import BLoBConfig
from hf_bayes.methods.variational.ekf import EKFConfig
from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
from hf_bayes.methods.variational.ivon import IVONConfig
from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.methods.variational.training_free import TrainingFreeConfig

METHODS: dict[str, type[MethodConfig]] = {
    "sghmc": SGHMCConfig,
    "sgld": SGLDConfig,
    "baoab": BAOABConfig,
    "sgnht": SGNHTConfig,
    "sghmc_euler": SGHMCEulerConfig,
    "map": MAPConfig,
    "ensemble": EnsembleConfig,
    "mean_field": MeanFieldConfig,
    "ivon": IVONConfig,
    "low_rank_vi": LowRankVIConfig,
    "full_rank_vi": FullRankVIConfig,
    "ekf": EKFConfig,
    "metropolis": MetropolisConfig,
    "hmc": HMCConfig,
    "laplace": LaplaceConfig,
    "penalty": PenaltyConfig,
    "agps": AGPSConfig,
    "gps": GPSConfig,
    "sgd_mc": SGDMCConfig,
    "snapshot": SnapshotConfig,
    "swa": SWAConfig,
    "swag": SWAGConfig,
    "mc_dropout": MCDropoutConfig,
    "training_free": TrainingFreeConfig,
    "blob": BLoBConfig,
}


NUM_NAMED = 3
"""The largest number of methods that an error message names."""


def names_with(condition: Callable[[Requirements], bool]) -> str:
    """Return, for error messages, names of methods whose requirements, by their defaults, meet a condition."""
    found = [name for name, kind in METHODS.items() if condition(kind().requirements)]
    named = ", ".join(found[:NUM_NAMED])
    return named if len(found) <= NUM_NAMED else f"such as {named}; hf_bayes.METHODS has all methods"


def from_dict(values: Mapping[str, Any]) -> MethodConfig:
    """Return the config that ``MethodConfig.to_dict`` wrote. Fields that are missing keep their defaults.

    Raises:
        ValueError: for a missing or unknown name, an unknown field, or a value out of range.
    """
    name = values.get("name")
    if name not in list(METHODS):  # a list also compares what has no hash
        raise ValueError(f"unknown method {name!r} (key 'name'): the methods are {', '.join(sorted(METHODS))}")
    config = METHODS[name]
    known = sorted(field.name for field in fields(config))
    unknown = sorted(set(values) - {"name", *known})
    if unknown:
        raise ValueError(f"{name} has no field {', '.join(map(repr, unknown))}: its fields are {', '.join(known)}")
    return config(**{key: value for key, value in values.items() if key != "name"})
