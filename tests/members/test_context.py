from __future__ import annotations

import torch

from hf_bayes.members.context import Context


def begun(num_members: int = 2, num_rows: int = 3) -> Context:
    context = Context()
    context.num_members = num_members
    context.begin(num_rows, 4, trunk=True)
    return context


def test_rows_are_repeated_member_by_member() -> None:
    rows = torch.arange(3.0)[:, None]
    assert begun().repeat(rows).flatten().tolist() == [0, 1, 2, 0, 1, 2]
    assert begun(num_members=1).repeat(rows) is rows


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


def test_a_recomputed_block_sees_the_state_of_its_first_run() -> None:
    context = begun(num_rows=3)
    _, restored = context.replayed()
    context.begin(7, 4, trunk=False)
    with restored:
        assert (context.num_rows, context.trunk) == (3, True)
    assert (context.num_rows, context.trunk) == (7, False)


def test_a_block_is_recomputed_again_and_within_itself() -> None:
    context = begun(num_rows=3)
    _, restored = context.replayed()
    context.begin(7, 4, trunk=False)
    for _ in range(2):
        with restored:
            context.begin(5, 4, trunk=False)
            with restored:
                assert context.num_rows == 3
            assert context.num_rows == 5
        assert context.num_rows == 7
