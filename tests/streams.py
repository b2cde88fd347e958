"""Thousands of chains would spend their time asking a generator each: let all of them draw from the first."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

Generators = Sequence[torch.Generator]


def share_one_stream(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Replace the draws that these modules have imported, until the end of the test."""
    for module in modules:
        for name, draw in DRAWS.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, draw)


def _normal(rngs: Generators, like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=rngs[0])


def _uniform(rngs: Generators, like: Tensor) -> Tensor:
    return torch.rand(len(like), dtype=like.dtype, generator=rngs[0])


def _gamma(rngs: Generators, alpha: Tensor) -> Tensor:
    return torch._standard_gamma(alpha, generator=rngs[0])


DRAWS = {"randn": _normal, "rand": _uniform, "_standard_gamma": _gamma}
