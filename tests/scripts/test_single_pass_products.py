"""The counts of matrix products of a single pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scripts.reproduce.single_pass_accuracy import classifier, words
from scripts.reproduce.single_pass_products import BLOCKS, WIDTH, backward_share, counted, products, products_table


def test_a_product_of_matrices_counts_twice_its_size() -> None:
    assert counted(nn.Linear(5, 7), {"input": torch.zeros(3, 5)}) == 2 * 3 * 5 * 7


def test_a_backward_pass_of_all_blocks_is_short_of_a_forward() -> None:
    assert backward_share(2) == pytest.approx((2 + 10 / 32 + 9) / 72)
    assert 1 - backward_share(BLOCKS) == pytest.approx((12 - 9 + 10 * 31 / 32) / 72)  # what it leaves out


def test_counted_products_exceed_their_bound_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.reproduce.single_pass_products.RANDOM", {"last two": 2})
    rows = products(classifier, words)
    assert [row["covariance"] for row in rows] == ["diagonal", "K-FAC"]
    for rank in (1, 2):
        # the remainder is LoRA of rank 8: in a block 18 w r of 12 w w products per position, twice in a backward pass
        own = rows[0][f"counted, {rank}"] - rows[0][f"bound, {rank}"]
        assert 0 < own < rank * 2 * 2 * 18 * 8 / (12 * WIDTH * BLOCKS)
        assert rows[1][f"counted, {rank}"] > rows[0][f"counted, {rank}"]  # eigenvectors rotate the gradients
    assert products_table(rows).count("\n") == 3
