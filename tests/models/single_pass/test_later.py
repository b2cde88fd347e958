"""Columns at chosen rows alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor
from hf_bayes.models.single_pass.later import Choose, Later, everything
from hf_bayes.models.single_pass.tangents import Tangents
from scripts.reproduce.small_models import attached
from tests.models.single_pass.cases import normal

COLUMNS = normal(4, 2, 5, 4)  # the last one is the drift of the mean


class Counted:
    """Columns that count the rows for which they were made."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, choose: Choose) -> Tensor:
        found = COLUMNS if choose is everything else torch.vmap(choose)(COLUMNS)
        self.rows.append(found[0, ..., 0].numel())
        return found


def behind(made: Counted) -> Any:
    """The output of a block of linear layers, norms, activations and a skip connection."""
    torch.manual_seed(0)
    x = GaussianTensor.of(normal(2, 5, 4, seed=1), Tangents(Later(made)))
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4)).double().requires_grad_(False)
    return layers(x) + x


def test_columns_at_a_choice_are_the_choice_of_columns() -> None:
    chosen = behind(Counted())[:, 0].spread.roots
    assert (chosen - behind(Counted()).spread.roots[:, :, 0]).abs().max() < 1e-12  # rounding


def test_rows_that_are_not_read_are_not_computed() -> None:
    made = Counted()
    assert behind(made).view(10, 4)[3:5].spread.roots.shape == (3, 2, 4)
    assert made.rows == [2]  # once, though the skip connection reads them, too


def test_columns_that_have_been_read_are_not_made_again() -> None:
    made = Counted()
    later = Later(made)
    chosen = later.at(lambda part: part[0])
    assert torch.equal(later.value[:, 0], chosen.value)
    assert made.rows == [10]


def test_the_last_block_of_a_classifier_runs_on_one_token() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    bayesian = attached(BertForSequenceClassification(config).eval(), "attention.self.value|classifier")
    bayesian.single_pass(structure="low_rank", rank=4)
    sizes = []
    linear = nn.functional.linear

    def counting(x: Any, weight: Any, *rest: Any) -> Any:
        sizes.append((x[..., 0].numel(), weight.shape[0])) if not isinstance(x, GaussianTensor) else None
        return linear(x, weight, *rest)

    nn.functional.linear = counting
    try:
        bayesian(input_ids=torch.randint(0, 30, (2, 7)))
    finally:
        nn.functional.linear = linear
    inner = [rows for rows, width in sizes if width == 32]
    assert 5 * 2 in inner  # four columns and the drift at the first token of two rows, behind the last attention
