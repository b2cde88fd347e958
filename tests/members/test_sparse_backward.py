"""Backward passes of linear layers that leave out positions without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from hf_bayes.members import sparse_backward
from hf_bayes.members.single_member import as_single_model
from hf_bayes.members.sparse_backward import product, rows_with_gradient, skipping_zeros
from scripts.reproduce.small_models import attached
from tests.tiny_models import inputs_of, tiny_bert, with_lora


@pytest.mark.parametrize("first", [0, 3, 7])
def test_rows_without_a_gradient_have_a_zero_product(first: int) -> None:
    weight = torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = torch.zeros(2, 8, 16, dtype=torch.float64)
    g[0, first, 2] = 1.0  # within the first columns
    g[1, first, 12] = 2.0  # behind them
    assert rows_with_gradient(g).nonzero().tolist() == [[0, first], [1, first]]
    # sums of one term are exact
    assert torch.equal(product(g, weight), g @ weight)


def test_many_rows_with_a_gradient_are_multiplied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__setitem__", None)  # rows are chosen nowhere
    g, weight = torch.ones(4, 16), torch.ones(16, 3)
    assert torch.equal(product(g, weight), torch.full((4, 3), 16.0))


@pytest.mark.parametrize("last", [3, 8])
def test_a_sum_of_products_has_the_rows_of_each(last: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, factor = (torch.randn(rows, 40, generator=generator, dtype=torch.float64) for rows in (16, 2))
    g, small = torch.zeros(8, 16, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)
    g[:last, 3], small[last - 1 :, 1] = 1.0, 2.0
    assert torch.equal(product(g, weight, (small, factor)), g @ weight + small @ factor)


def gradient(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a sum of outputs in the embedded words."""
    words = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    (model(inputs_embeds=words, attention_mask=inputs["attention_mask"]).logits * torch.arange(1, 4)).sum().backward()
    assert words.grad is not None
    return words.grad


def random_lora() -> nn.Module:
    model = with_lora(tiny_bert(dtype=torch.float64))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("active", [True, False])
def test_gradients_in_inputs_are_those_of_autograd(active: bool) -> None:
    inputs = inputs_of(model := random_lora(), rows=4)
    with attached(model, "trainable") as bayesian:
        theta = bayesian.theta[0]
        model.base_model.set_adapter("default") if active else model.base_model.disable_adapter_layers()
        with as_single_model(bayesian.members, theta):
            expected = gradient(model, inputs)
            with skipping_zeros(bayesian.members):
                found = gradient(model, inputs)
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_a_factor_with_another_input_is_not_joined() -> None:
    inputs = inputs_of(model := random_lora(), rows=4)
    with attached(model, "trainable") as bayesian, as_single_model(bayesian.members, bayesian.theta[0]):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout["default"] = nn.Softplus()  # a factor has the input of this module
        expected = gradient(model, inputs)
        with skipping_zeros(bayesian.members):
            assert (gradient(model, inputs) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_outputs_are_the_same_and_no_product_reads_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def counted(g: torch.Tensor, *others: Any) -> torch.Tensor:
        shares.append(float(g.ne(0).any(-1).float().mean()))
        return product(g, *others)

    monkeypatch.setattr(sparse_backward, "product", counted)
    inputs = inputs_of(model := with_lora(tiny_bert()), rows=4)
    expected = model(**inputs).logits
    with attached(model, "trainable") as bayesian:
        before = [vars(module).get("forward") for module in bayesian.model.modules()]
        with skipping_zeros(bayesian.members):
            pass
        after = [type(vars(module).get("forward")) for module in bayesian.model.modules()]
        assert after == [type(one) for one in before]
        bayesian.single_pass(structure="backward")
        found = bayesian.predictor.outputs(bayesian, inputs)
    assert torch.equal(found.mean[0], expected)
    assert min(shares) <= 1 / 4  # behind the last attention only the first position is read
