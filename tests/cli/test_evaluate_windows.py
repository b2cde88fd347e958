from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bayes.cli.evaluate_windows import WindowArguments, evaluate_windows, windows_of
from hf_bayes.models.attaching import attach
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer, with_lora


def test_no_windows_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="--max_windows must be at least 1, got 0"):
        WindowArguments(max_windows=0)


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 4))
    every = windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=16, limit=1000)
    some = windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=16, limit=2)
    assert torch.equal(some, every[[0, len(every) // 2]])
    with pytest.raises(ValueError, match=r"text.txt is shorter than one window of 5000 tokens: give more text"):
        windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=5000, limit=2)


def test_tokens_keep_their_window_in_batches_of_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    model = attach(with_lora(tiny_llama()), num_members=3)
    model.theta.data += 0.3 * torch.randn(model.theta.shape, generator=generator)
    windows = torch.randint(3, 300, (5, 8), generator=generator)
    found = evaluate_windows(model, {"test": windows}, batch_size=2)["test"]
    alone = evaluate_windows(model, {"test": windows[3:4]}, batch_size=1)["test"]
    assert found["nll"].shape == (5, 7)
    assert found["nll"][3] == pytest.approx(alone["nll"][0], rel=1e-4)
    assert {"total", "epistemic", "confidence", "correct", "brier", "member_nll"} <= set(found)
