from __future__ import annotations

import pytest
import torch

from hf_bayes.members.context import Context, cast, unfold


def begun(num_members: int = 2, num_rows: int = 3) -> Context:
    context = Context()
    context.num_members = num_members
    context.begin(num_rows, 4, trunk=True)
    return context


def test_rows_are_repeated_member_by_member() -> None:
    rows = torch.arange(3.0)[:, None]
    assert begun().repeat(rows).flatten().tolist() == [0, 1, 2, 0, 1, 2]
    assert begun(num_members=1).repeat(rows) is rows


def test_unfold_is_the_inverse_of_fold() -> None:
    folded = torch.randn(6, 4, 5)
    split = begun().fold(folded)
    assert split.shape == (2, 12, 5)
    assert torch.equal(split[1], folded[3:].reshape(12, 5))  # row m * B + b belongs to member m
    assert torch.equal(unfold(split, folded, 2), folded)
    assert begun().fold(split) is split


def test_copies_are_recognised_once_and_by_the_same_tensor() -> None:
    context, rows = begun(), torch.randn(3, 5)
    copies = context.repeat(rows)
    assert context.single(rows) is rows
    assert context.single(copies) is None  # they are not marked as copies
    context.mark_fanned_out(copies=True)
    for _ in range(3):  # query, key and value projections
        assert torch.equal(context.single(copies), rows)
    assert context.single(copies.clone()) is None
    context.end()
    assert context.single(copies) is None


def test_a_parameter_without_members_is_named() -> None:
    context = begun()
    context.tensors = {"w": torch.ones(2, 1)}
    assert torch.equal(context.members_of("w"), torch.ones(2, 1))
    assert context.used == {"w"}
    with pytest.raises(RuntimeError, match="lm_head is random: call the BayesianModel that holds this model"):
        context.members_of("lm_head")


def test_a_recomputed_block_sees_the_state_of_its_first_run() -> None:
    context = begun(num_rows=3)
    _, restored = context.replayed()
    context.begin(7, 4, trunk=False)
    with restored:
        assert (context.num_rows, context.trunk) == (3, True)
    assert (context.num_rows, context.trunk) == (7, False)


def test_cast_leaves_dtypes_to_autocast() -> None:
    value = torch.ones(1)
    assert cast(value, torch.float64).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast(value, torch.bfloat16) is value
