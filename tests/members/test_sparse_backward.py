"""Backward passes of linear layers that leave out positions without a gradient."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.members import sparse_backward
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


def test_outputs_are_the_same_and_no_product_reads_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def counted(g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shares.append(float(g.ne(0).any(-1).float().mean()))
        return product(g, weight)

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
