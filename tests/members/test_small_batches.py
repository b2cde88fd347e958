from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from hf_bayes.members import small_batches
from hf_bayes.members.small_batches import MAX_ROWS, MIN_ROWS, BlockedLinears
from hf_bayes.models.attaching import attach
from tests import tiny_models as models

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the layers are left alone without MKL")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of the products that were computed in blocks."""
    rows: list[int] = []
    own = torch.bmm

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        rows.append(x.shape[1])
        return own(x, weight)

    monkeypatch.setattr(small_batches.torch, "bmm", counted)
    return rows


def with_blocks(layer: nn.Linear) -> nn.Linear:
    BlockedLinears(layer, []).install()
    return layer


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8, 1), (2, 3), (5,), (1, 3, 4)], ids=str)
def test_products_in_blocks_are_those_of_the_layer(shape: tuple[int, ...], bias: bool, blocked: list[int]) -> None:
    torch.manual_seed(0)
    layer, x = with_blocks(nn.Linear(48, 96, bias=bias)), torch.randn(*shape, 48)
    wide = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.no_grad():
        found = layer(x)
    assert blocked == [x.numel() // 48]
    assert found.shape == wide.shape
    # 48 products of numbers about 1 and 1/7; each sum has a relative rounding error of 2^-24
    assert (found.double() - wide).abs().max() < 48 * 2**-24


@needs_mkl
def test_only_few_rows_in_float32_without_gradients_go_in_blocks(blocked: list[int]) -> None:
    layer = with_blocks(nn.Linear(32, 64))
    with torch.no_grad():
        for rows in (1, MIN_ROWS - 1, MAX_ROWS + 1, 64):
            layer(torch.randn(rows, 32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(torch.randn(8, 32)).dtype == torch.bfloat16
        layer.double()(torch.randn(8, 32, dtype=torch.float64))
    layer.float()(torch.randn(8, 32)).sum().backward()
    assert layer.weight.grad is not None
    assert blocked == []


def test_random_layers_and_odd_output_sizes_are_left_alone() -> None:
    random, odd, frozen = nn.Linear(8, 64), nn.Linear(8, 50), nn.Linear(8, 64)
    few = BlockedLinears(nn.ModuleList([random, odd, frozen]), [random])
    assert few.modules == ([frozen] if torch.backends.mkl.is_available() else [])


@needs_mkl
def test_forwards_are_given_back_and_those_of_others_kept() -> None:
    model: Any = models.with_lora(models.tiny_llama(hidden_size=32, intermediate_size=64))
    gate, up = model.base_model.model.model.layers[0].mlp.gate_proj, model.base_model.model.model.layers[0].mlp.up_proj
    own = up.forward = lambda x: F.linear(x, up.weight)
    bayesian = attach(model)
    assert "forward" in vars(gate)
    assert up.forward is own
    bayesian.detach()
    assert "forward" not in vars(gate)
    assert up.forward is own


@needs_mkl
def test_generated_tokens_of_members_go_in_blocks(blocked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bayesian = attach(models.with_lora(models.tiny_llama(hidden_size=32, intermediate_size=64)))
    bayesian.theta.data = bayesian.theta.detach().expand(4, -1).clone()
    bayesian.eval()
    prompt = torch.tensor([[3, 4, 5, 6, 7]])  # the products of LoRA have 5 rows per member at first, and 1 row later
    bayesian.generate(prompt, max_new_tokens=3, do_sample=False)
    assert 4 in blocked
    blocked.clear()
    monkeypatch.setattr(small_batches, "MAX_ROWS", 0)  # the broken twin
    bayesian.generate(prompt, max_new_tokens=3, do_sample=False)
    assert 4 not in blocked


class Other(Tensor):
    """A tensor type with its own products, as quantised tensors have."""


@needs_mkl
def test_weights_of_another_kind_keep_their_own_products(blocked: list[int]) -> None:
    layer = with_blocks(nn.Linear(32, 64, bias=False))
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Other))
    with torch.no_grad():
        layer(torch.randn(8, 32))
    assert blocked == []


@needs_mkl
def test_a_weight_rebuilt_for_each_call_is_read_anew(blocked: list[int]) -> None:
    layer = nn.Linear(32, 64)
    prune.random_unstructured(layer, "weight", amount=0.5)  # ``weight`` is not a parameter any more
    x, layer = torch.randn(8, 32), with_blocks(layer)
    with torch.no_grad():
        first = layer(x)
        layer.weight_orig.mul_(2)  # type: ignore[operator]
        layer.bias.mul_(2)
        found = layer(x)
    assert blocked == [8, 8]
    assert torch.equal(found, 2 * first)


@needs_mkl
def test_rows_that_are_not_contiguous_are_read_correctly() -> None:
    torch.manual_seed(0)
    layer, x = with_blocks(nn.Linear(48, 96)), torch.randn(48, 8).T
    with torch.no_grad():
        assert (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max() < 48 * 2**-23
        every_second = torch.randn(8, 96)[:, ::2]
        assert (layer(every_second) - F.linear(every_second, layer.weight, layer.bias)).abs().max() < 48 * 2**-23


def test_inputs_of_another_width_are_refused_as_by_the_layer() -> None:
    layer = with_blocks(nn.Linear(48, 96))
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(8, 24))  # as many numbers as 4 rows of 48


@pytest.mark.parametrize(
    "change", [lambda w: w.T.contiguous().T, lambda w: torch.cat([w, w[:1]])], ids=["laid", "grown"]
)
def test_a_weight_that_came_to_fit_no_blocks_is_still_read_right(change: Any, blocked: list[int]) -> None:
    torch.manual_seed(0)
    layer, x = with_blocks(nn.Linear(48, 96, bias=False)), torch.randn(8, 48)
    layer.weight.data = change(layer.weight.data)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert blocked == []
