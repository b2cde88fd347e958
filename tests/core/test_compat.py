from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.compat import NAMES, num_writes, plain_tensor_functions, standard_gamma


@pytest.mark.parametrize("path", NAMES)
def test_torch_has_the_private_name(path: str) -> None:
    root, *names = path.split(".")
    found: Any = importlib.import_module(root)
    for name in names:
        assert hasattr(found, name)
        found = getattr(found, name)


def test_gamma_draws_come_from_the_generator_and_have_mean_alpha() -> None:
    alpha = torch.full((4000,), 3.0, dtype=torch.float64)
    draws, again = (standard_gamma(alpha, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(draws, again)
    assert draws.mean().item() == pytest.approx(3.0, abs=4 * (3 / 4000) ** 0.5)  # 4 standard errors
    assert draws.var().item() == pytest.approx(3.0, rel=0.2)


def test_every_write_into_a_tensor_counts() -> None:
    tensor = torch.zeros(2)
    assert num_writes(tensor) == 0
    tensor += 1
    tensor[0] = 3.0
    assert num_writes(tensor) == 2


def test_a_subclass_is_plain_within_the_context() -> None:
    calls = []

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor: Tensor = torch.ones(2).as_subclass(Counted)  # type: ignore[arg-type]
    with plain_tensor_functions():
        torch.exp(tensor)
    assert not calls
    torch.exp(tensor)
    assert calls == [torch.exp]
