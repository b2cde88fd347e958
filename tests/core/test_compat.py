from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.compat import (
    BATCH_NORM,
    DROPOUT,
    NAMES,
    PrivateName,
    forward_with,
    num_writes,
    plain_tensor_functions,
    standard_gamma,
)
from tests.host_names import fault_of, label


@pytest.mark.parametrize("entry", NAMES, ids=label)
def test_torch_has_the_private_name(entry: PrivateName) -> None:
    assert fault_of(entry) == ""


def test_torch_s_layers_have_the_private_bases() -> None:
    assert all(issubclass(kind, BATCH_NORM) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(kind, DROPOUT) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


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


def test_forward_with_reads_given_values_and_restores_others() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    before = layer.weight
    assert forward_with(layer, {"weight": 3 * torch.eye(2)}, x).tolist() == [[3.0, 3.0]]
    assert layer.weight is before
    assert "weight" not in vars(layer)
