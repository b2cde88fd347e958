"""The record of a tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bayes.training.tuning.record import RECORD, TuningRecord, TuningTrial


def trial(name: str = "map", gradients: int = 100, nll: list[float] | None = None, **changes) -> TuningTrial:
    """Return a trial on four rows of one term each."""
    values = [0.5, 0.7, 0.2, 0.6] if nll is None else nll
    return TuningTrial(
        name, gradients, 2.0, 1, {"accuracy": 0.5, "temperature": 0.8}, values, [1] * len(values)
    )._replace(**changes)


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    TuningRecord.open(tmp_path / "new", {"seed": 1}).add(trial())
    again = TuningRecord.open(tmp_path / "new", {"seed": 1})
    assert again.find("map", 100) == trial()
    assert again.find("map", 200) is None
    again.add(trial(gradients=200))
    assert TuningRecord.open(tmp_path / "new", {"seed": 1}).find("map", 200) == trial(gradients=200)


def test_the_record_of_another_tuning_is_refused(tmp_path: Path) -> None:
    TuningRecord.open(tmp_path, {"seed": 1, "rows": "a"}).add(trial())
    with pytest.raises(
        ValueError, match=r"record of another tuning: rows: saved 'a', now 'b'\. Choose another output_dir"
    ):
        TuningRecord.open(tmp_path, {"seed": 1, "rows": "b"})


def test_an_identity_is_compared_as_json_gives_it_back(tmp_path: Path) -> None:
    identity = {"candidate a": {"name": "sghmc", "ladder": {"temperature": (1, 0.3)}}}
    TuningRecord.open(tmp_path, identity).add(trial())
    assert TuningRecord.open(tmp_path, identity).find("map", 100) == trial()


def test_a_crash_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = TuningRecord.open(tmp_path, {})
    record.add(trial())
    before = (tmp_path / RECORD).read_text()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("no power")))
    with pytest.raises(OSError, match="no power"):
        record.add(trial("ensemble"))
    assert (tmp_path / RECORD).read_text() == before
    assert json.loads(before)["trials"][0]["name"] == "map"


def test_differences_are_paired_by_row() -> None:
    difference, error = trial(nll=[0.6, 0.8, 0.3, 0.7]).difference(trial())
    assert difference == pytest.approx(0.1)
    assert error == pytest.approx(0, abs=1e-12)


def test_a_failed_trial_has_an_infinite_nll() -> None:
    assert trial(nll=[], failure="diverged").mean_nll == float("inf")
