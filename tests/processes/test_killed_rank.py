"""F10: one of two processes is killed; the other must not hang, and the run goes on from what is on disk."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.checkpoints import newest_complete
from tests.faults.posteriors import equal
from tests.faults.ranks import STEPS, launch


@pytest.mark.slow
@pytest.mark.reliability("F10")
def test_a_killed_process_ends_the_other_and_the_run_resumes(tmp_path: Path, injected: Callable[[int], None]) -> None:
    """One run that is killed at each of its steps, in turn in the middle of it and of its save, and resumed."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    for step in range(1, STEPS):
        statuses, logs, seconds = launch(run, "step" if step % 2 else "save", str(step))
        assert statuses[1] == -signal.SIGKILL, logs
        assert statuses[0] > 0
        assert "Error" in logs[0]
        assert seconds < 120
        newest = newest_complete(run)
        assert (Path(newest).name if newest else None) == (f"checkpoint-{step - 1}" if step > 1 else None)
    injected(STEPS - 1)
    for directory in (run, whole):
        statuses, logs, _ = launch(directory)
        assert statuses == [0, 0], logs
    assert equal(Posterior.from_pretrained(run), Posterior.from_pretrained(whole))  # with diagnostics
