"""The record of a tuning: one entry for each finished trial, kept in a file so that a later call goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from hf_bayes.core.types import RowScores
from hf_bayes.diagnostics.comparison import difference_std_error
from hf_bayes.training.checkpoints import differences

RECORD = "tuning.json"


class TuningTrial(NamedTuple):
    """One run of a candidate.

    Attributes:
        name: the name of the candidate.
        gradients: minibatch gradients, summed over chains.
        seconds: the wall time of training and of the evaluation.
        cost: forward passes of a prediction.
        metrics: the metrics of the held-out rows, at the temperature of the mixture. ``temperature`` is one of them.
        nll: the negative log-likelihood of each held-out row, in nats.
        terms: likelihood terms of each held-out row.
        failure: why the run ended early; empty if it did not.
    """

    name: str
    gradients: int
    seconds: float
    cost: int
    metrics: dict[str, float]
    nll: list[float]
    terms: list[int]
    failure: str = ""

    @property
    def mean_nll(self) -> float:
        """The held-out NLL in nats per term; infinite if the run failed."""
        return sum(self.nll) / sum(self.terms) if self.nll else float("inf")

    @property
    def rows(self) -> RowScores:
        """The NLL of every row, for paired comparisons."""
        return RowScores(np.array(self.nll), np.array(self.terms, dtype=np.int64))

    def difference(self, other: TuningTrial) -> tuple[float, float]:
        """Return the NLL minus the other's, and the standard error of this difference over rows."""
        error = difference_std_error(self.rows, other.rows)
        return self.mean_nll - other.mean_nll, float("nan") if error is None else error


class TuningRecord:
    """The finished trials of a tuning.

    Args:
        directory: the folder of the file.
        identity: what the trials have in common (``tuning_identity``).
    Raises:
        ValueError: if the folder holds the record of another tuning, naming what differs.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = directory / RECORD, identity
        self._trials: dict[tuple[str, int], TuningTrial] = {}
        if not self._path.exists():
            return
        content = json.loads(self._path.read_text(encoding="utf-8"))
        if words := differences(content["identity"], identity):
            raise ValueError(
                f"{self._path} is the record of another tuning: {words}. Choose another output_dir, or remove the file"
            )
        for entry in content["trials"]:
            self._keep(TuningTrial(**entry))

    def find(self, name: str, gradients: int) -> TuningTrial | None:
        """Return the trial of an earlier call, which may have failed; None if there is none."""
        return self._trials.get((name, gradients))

    def add(self, trial: TuningTrial) -> None:
        """Store a finished trial. A crash leaves the old or the new file."""
        self._keep(trial)
        content = {"identity": self._identity, "trials": [trial._asdict() for trial in self._trials.values()]}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        os.replace(new, self._path)

    def _keep(self, trial: TuningTrial) -> None:
        self._trials[trial.name, trial.gradients] = trial

    @classmethod
    def open(cls, directory: str | os.PathLike[str], identity: dict[str, Any]) -> Self:
        """Return the record in a folder, which is made if it is missing."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        return cls(Path(directory), identity)
