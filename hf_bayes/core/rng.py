"""Random numbers from explicit generators. The seed of a generator is a pure function of a readable key."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_integral
from hf_bayes.core.types import Rngs

MAX_SEED = 2**64 - 1
"""The largest seed of a ``torch.Generator``."""


class MirroredGenerator(torch.Generator):
    """A generator whose standard normals (``randn``) have the opposite sign."""


def require_seed(seed: Any, *, name: str = "seed", largest: int = MAX_SEED) -> None:
    """Raise a ValueError unless generators accept this seed."""
    if not is_integral(seed) or not 0 <= int(seed) <= largest:
        raise ValueError(
            f"{name} must be an integer from 0 to 2**{largest.bit_length()} - 1, the range of random generators, "
            f"got {seed!r:.100}: choose one in that range"
        )


def seed_of(*key: object) -> int:
    """Return a 56-bit seed for a key such as ``(seed, "chain", 3)``; it is the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator, seeded by ``seed_of(*key)``."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def device_of(generator: torch.Generator | None) -> torch.device:
    """Return the device on which a generator draws; None is torch's global generator, of the CPU."""
    return torch.device("cpu") if generator is None else generator.device


def chain_generators(
    seed: int,
    num_chains: int,
    *,
    chains: range | None = None,
    device: torch.device | str = "cpu",
    mirrored: bool = False,
) -> list[torch.Generator]:
    """Return one generator for each of ``chains`` (None: all), seeded by (seed, chain).

    Args:
        mirrored: every chain with an odd number gets minus the standard normals of the chain before it.
    Raises:
        ValueError: if two of all chains would draw the same numbers. A generator of the CPU (a Mersenne twister) keeps
            32 bits of its seed, and two of K chains share these bits with probability K^2 / 2^33.
    """
    owners: dict[int, int] = {}
    for chain in range(num_chains):
        other = owners.setdefault(seed_of(seed, "chain", chain) % 2**32, chain)
        if other != chain:
            raise ValueError(
                f"seed {seed} gives chains {other} and {chain} of {num_chains} the same random numbers, so they would "
                "be one chain twice: choose another seed"
            )
    return [_of_chain(seed, chain, device, mirrored=mirrored) for chain in chains or range(num_chains)]


def _of_chain(seed: int, chain: int, device: torch.device | str, *, mirrored: bool) -> torch.Generator:
    if mirrored and chain % 2 == 1:
        return MirroredGenerator(device=device).manual_seed(seed_of(seed, "chain", chain - 1))
    return generator(seed, "chain", chain, device=device)


def spare_generators(rngs: Rngs) -> list[torch.Generator]:
    """Return generators for a state that is thrown away, so that the chains' own generators do not advance."""
    return [torch.Generator(device=rng.device).manual_seed(0) for rng in rngs]


def randn(rngs: Rngs, like: Tensor) -> Tensor:
    """Return standard normals [M, ...] of the shape, dtype and device of ``like``; row m uses generator m alone."""
    drawn = torch.empty_like(like, memory_format=torch.contiguous_format)
    for rng, row in zip(rngs, drawn, strict=True):
        torch.randn(row.shape, generator=rng, out=row)
        if isinstance(rng, MirroredGenerator):
            row.neg_()
    return drawn


def rand(rngs: Rngs, like: Tensor) -> Tensor:
    """Return [M] uniforms on [0, 1), one from each generator."""
    return torch.stack([torch.rand((), generator=rng, dtype=like.dtype, device=like.device) for rng in rngs])
