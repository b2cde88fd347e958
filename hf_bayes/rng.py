"""Random numbers only through explicit generators, each a pure function of a readable key."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hf_bayes.types import Rngs


def seed_of(*key: object) -> int:
    """A 56-bit seed, the same in every process, for a key such as ``(seed, "chain", 3)``."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator seeded by ``seed_of(*key)``."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def randn(rngs: Rngs, like: Tensor) -> Tensor:
    """[M, ...] standard normals of the shape, dtype and device of ``like``; row m comes from generator m alone."""
    return torch.stack(
        [torch.randn(like.shape[1:], generator=rng, dtype=like.dtype, device=like.device) for rng in rngs]
    )


def rand(rngs: Rngs, like: Tensor) -> Tensor:
    """[M] uniforms on [0, 1), one from each generator."""
    return torch.stack([torch.rand((), generator=rng, dtype=like.dtype, device=like.device) for rng in rngs])
