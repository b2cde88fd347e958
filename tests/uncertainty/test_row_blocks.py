from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from hf_bayes.uncertainty import row_blocks
from hf_bayes.uncertainty.decomposition import decompose, finish, mixture, partial, predict
from tests.uncertainty.brute_force import check, naive, random_logits


def test_there_may_be_no_rows_and_any_number_of_dimensions() -> None:
    for lead in ((), (0,), (3, 0, 2), (2, 1, 3)):
        logits = torch.randn(2, *lead, 5)
        log_probs, parts = predict(logits)
        streamed = finish(partial(logits))
        assert log_probs.shape == streamed.log_probs.shape == mixture(logits).shape == (*lead, 5)
        assert all(part.shape == lead for part in (*parts, *decompose(logits), *streamed.uncertainty))


def test_views_give_what_their_copies_give() -> None:
    logits = random_logits(3, 4, 6, 30)
    views = [logits[:, :, :-1], logits[:, ::2, 1:], logits.transpose(1, 2), logits[..., ::2], logits[1:, 0]]
    for view in [*views, logits.permute(3, 1, 2, 0)]:
        check(decompose, view)
        assert_close(mixture(view), mixture(view.contiguous()), rtol=0, atol=0)


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, mask = random_logits(4, 5, 11, 25), torch.rand(5, 11) < 0.5
    whole, masked = predict(logits), decompose(logits, mask=mask)
    for limit in (1, 4 * 25 * 4 * 7):  # one row at a time; and seven rows, which is no divisor
        monkeypatch.setattr(row_blocks, "_BLOCK_BYTES_THREAD", limit // min(torch.get_num_threads(), 4))
        log_probs, parts = predict(logits)
        assert_close(log_probs, whole.log_probs, rtol=0, atol=1e-6)
        for one, other in zip(parts, whole.uncertainty, strict=True):
            assert_close(one, other, rtol=0, atol=1e-6)
        for one, other in zip(decompose(logits, mask=mask), masked, strict=True):
            assert_close(one, other, rtol=0, atol=1e-6, equal_nan=True)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Measure the peak of additionally allocated memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    del result
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_does_not_grow_with_the_rows(dtype: torch.dtype) -> None:
    logits = random_logits(8, 2, 12, 32000, scale=1.0).to(dtype)
    logits[:, 0] = logits[:1, 0]  # includes rows that are computed again
    mask = torch.ones(2, 11, dtype=torch.bool)
    # Two buffers of 4 MiB, two copies of a block for selected rows, a few rows of the mixture.
    work = 20 * 2**20
    assert peak_bytes(lambda: decompose(logits)) < work
    assert peak_bytes(lambda: decompose(logits[:, :, :-1])) < work
    assert peak_bytes(lambda: decompose(logits[:, :, :-1], mask=mask)) < work
    result = 24 * 32000 * 4
    assert peak_bytes(lambda: predict(logits)) < work + result
    assert peak_bytes(lambda: finish(partial(logits))) < work + 2 * result
    twice = torch.cat([logits, logits], 2)
    assert peak_bytes(lambda: decompose(twice)) < work
    assert peak_bytes(lambda: naive(twice)) > 4 * work
