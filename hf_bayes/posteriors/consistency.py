"""Checks that the parts of a posterior fit together: theta, its config, its chains and its adapter."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.lora_keys import adapter_keys, partner_key


def with_chains(config: PosteriorConfig, chains: list[int]) -> PosteriorConfig:
    """Return the config with the chain of each draw, which a new config may leave out.

    Raises:
        ValueError: if the config names another number of draws, or other chains.
    """
    if len(chains) != config.num_members:
        raise ValueError(f"{len(chains)} draws, but num_members is {config.num_members}")
    if not config.member_chains:
        config = dataclasses.replace(config, member_chains=chains)
    if config.member_chains != chains:
        raise ValueError(f"draws come from chains {chains}, the config has {config.member_chains}")
    return config


def check_theta(rows: Tensor, layout: Layout) -> None:
    """Check that rows of theta fit the parameters, are float32 or float64, and are finite.

    Raises:
        ValueError: naming the parameter that is not finite, or what was expected.
    """
    if rows.shape[1] != layout.dim:
        raise ValueError(f"theta has {rows.shape[1]} columns, the parameters have {layout.dim} elements")
    if rows.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"theta must be float32 or float64, got {rows.dtype}: lower precision rounds draws away")
    for name, value in layout.unflatten(rows).items():
        if not bool(torch.isfinite(value).all()):
            bad = [int(row) for row in (~torch.isfinite(value.flatten(1))).any(1).nonzero()]
            raise ValueError(f"{name} is not finite in members {bad}: they are not saved")


def check_kind(approximation: Draws | Gaussian, config: PosteriorConfig) -> None:
    """Check that the config names the kind of the approximation, and that only draws have statistics.

    Raises:
        ValueError: if it names another one, or for a Gaussian over the statistics of batch normalisation.
    """
    if approximation.kind != config.approximation:
        raise ValueError(f"the approximation is {approximation.kind}, the config has {config.approximation}")
    statistics = [name for name, _ in config.parameters if name.endswith(".running_var")]
    if statistics and config.approximation != "draws":
        raise ValueError(
            f"{statistics[0]}: there is no Gaussian over the statistics of batch normalisation, which belong to the "
            "weights of each draw. Keep the draws"
        )


def check_distinct_chains(theta: Tensor, chains: list[int]) -> None:
    """Check that no draw occurs in two chains.

    Equal draws within a chain come from rejected proposals. Equal draws of two chains are one chain counted twice.

    Raises:
        ValueError: naming two equal draws of different chains.
    """
    seen: dict[bytes, int] = {}
    for index, row in enumerate(theta.detach().cpu().contiguous()):
        digest = hashlib.sha256(row.numpy()).digest()
        earlier = seen.setdefault(digest, index)
        if chains[earlier] != chains[index]:
            raise ValueError(
                f"members {earlier} and {index} (chains {chains[earlier]} and {chains[index]}) are equal: chains "
                "that shared a seed, a checkpoint or an adapter are one chain. Give each its own"
            )


def check_adapter_keys(layout: Layout) -> None:
    """Check that each parameter has its own key in an adapter file, and that no factor of a LoRA lacks its partner.

    Raises:
        ValueError: naming two parameters with one key, or the missing factor.
    """
    keys: dict[str, str] = {}
    for name, key in adapter_keys(layout.names).items():
        other = keys.setdefault(key, name)
        if other != name:
            raise ValueError(f"{other} and {name} would be one tensor {key!r} of the adapter")
    for key in keys:
        partner = partner_key(key)
        if partner is not None and partner not in keys:
            raise ValueError(
                f"the parameters hold {key} without {partner}: an adapter of one factor cannot be loaded. Sample "
                "both, or pass adapter_config=None to store plain tensors"
            )
