"""Scales learnt in windows: the standard deviations of the positions there."""

from __future__ import annotations

import torch

from hf_bayes.methods.mcmc.learnt_scales import add_position, place_of, scales_of

POSITIONS = torch.randn(40, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 100


def sums_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = squares = torch.full_like(positions[0], torch.nan)  # of an earlier window: the first position forgets it
    for count, theta in enumerate(positions, 1):
        mean, squares = add_position(theta, mean, squares, count)
    return mean, squares


def test_the_sums_are_those_of_all_positions_at_once() -> None:
    mean, squares = sums_of(POSITIONS)
    torch.testing.assert_close(mean, POSITIONS.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(squares, POSITIONS.var(0, correction=0) * 40, rtol=1e-10, atol=0)


def test_scales_are_standard_deviations_shrunk_by_their_weight() -> None:
    _, squares = sums_of(POSITIONS)
    before, logs = torch.ones(3, 5, dtype=torch.float64), POSITIONS.std(0, correction=0).log()
    torch.testing.assert_close(scales_of(squares, 40, weight=0, before=before).log(), logs, rtol=1e-10, atol=0)
    halfway = (logs + logs.mean(1, keepdim=True)) / 2
    torch.testing.assert_close(scales_of(squares, 40, weight=40, before=before).log(), halfway, rtol=1e-10, atol=0)


def test_what_did_not_move_gets_no_scale_of_zero() -> None:
    squares, before = torch.tensor([[0.0, 0.0], [0.0, 8.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    found = scales_of(squares, 2, weight=0, before=before)
    assert torch.equal(found[0], before[0])  # this chain did not move
    assert 0 < found[1, 0] < 1e-2 < found[1, 1]  # here one coordinate did not


def test_windows_begin_after_their_first_edge() -> None:
    windows = (10, 20, 40)
    assert [place_of(done, windows) for done in (10, 11, 20)] == [(10, 0), (11, 1), (20, 10)]
    assert [place_of(done, windows) for done in (21, 40, 41)] == [(1, 1), (20, 20), (1, 0)]
    assert place_of(7, ()) == (7, 0)
