"""The trials of a tuning: runs of its candidates on one model, each of which is kept as soon as it is finished."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from tqdm import tqdm

from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import MANIFEST
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.repeated_runs import finished_run
from hf_bayes.training.tuning.candidates import Candidate
from hf_bayes.training.tuning.record import TuningRecord, TuningTrial

KEPT = ("nll", "accuracy", "ece", "brier", "total", "epistemic", "member_nll")

FAILURES = (
    ValueError, FloatingPointError, torch.OutOfMemoryError, torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)  # fmt: skip
"""The errors that end a run, and not the tuning: one candidate must not end the others."""

Scores = tuple[dict[str, float], list[float], list[int]]
"""``TuningTrial``'s metrics, nll and terms."""


def trial_folder(output_dir: Path, name: str, gradients: int) -> Path:
    """Return the folder in which a tuning keeps the posterior of a finalist's trial."""
    return output_dir / "finalists" / f"{folder_name(name)}_{gradients}"


def folder_name(name: str) -> str:
    """Return the name of a candidate as a part of the name of a folder."""
    return "".join(c if c.isalnum() else "_" for c in name)


class Trials:
    """Runs of candidates on one model.

    Args:
        model, args: as for ``tune``.
        given: the other arguments of ``BayesianTrainer``.
        record: the trials of earlier calls.
    """

    def __init__(
        self, model: Any, args: BayesianTrainingArguments, given: dict[str, Any], record: TuningRecord
    ) -> None:
        self._model, self._args, self._given, self._record = model, args, given, record

    def remove_others(self, trials: Sequence[TuningTrial], finalists: Sequence[Candidate]) -> None:
        """Remove the posteriors of trials whose candidates are no finalists."""
        names = {candidate.name for candidate in finalists}
        for trial in trials:
            if trial.name not in names:
                shutil.rmtree(self._folder(trial.name, trial.gradients), ignore_errors=True)

    def run(self, candidate: Candidate, gradients: int, bar: Any) -> TuningTrial:
        """Return the trial of a candidate, finished now or by an earlier call. Its posterior is saved.

        A trial that failed in an earlier call runs again: the reason, such as too little memory, may be gone.
        """
        bar.set_postfix_str(candidate.name)
        found = self._record.find(candidate.name, gradients)
        if found is not None and found.failure:
            bar.write(f"{found.name} failed in an earlier call ({found.failure}) and runs again")
            found = None
        if found is None:
            found = self._attempt(candidate, gradients)
            self._record.add(found)
        bar.update(gradients)
        return found._replace(cost=candidate.cost)  # the cost decides the choice, and not the run

    def posterior(self, candidate: Candidate, gradients: int) -> Posterior:
        """Return the posterior of a finished trial. If it is gone, the candidate runs again.

        A call with a larger budget removes the posterior of a trial that is no finalist of its first round.
        """
        folder = self._folder(candidate.name, gradients)
        if not (folder / MANIFEST).exists():
            tqdm.write(f"{folder} holds no posterior any more: {candidate.name} runs again")
            self._train(candidate, gradients)
        return Posterior.from_pretrained(folder)

    def _folder(self, name: str, gradients: int) -> Path:
        return trial_folder(Path(str(self._args.output_dir)), name, gradients)

    def _attempt(self, candidate: Candidate, gradients: int) -> TuningTrial:
        """Return the trial of a candidate that runs now, whether it fails or not."""
        begin, failure = time.perf_counter(), ""
        scores: Scores = {}, [], []
        try:
            scores = self._train(candidate, gradients)
        except FAILURES as error:
            failure = str(error) or type(error).__name__
        if failure:
            clear_device_cache(garbage_collection=True)  # a trainer is part of reference cycles, which hold memory
        seconds = time.perf_counter() - begin
        return TuningTrial(candidate.name, gradients, seconds, candidate.cost, *scores, failure)

    def _train(self, candidate: Candidate, gradients: int) -> Scores:
        updates = gradients // candidate.gradients_per_update // self._args.gradient_accumulation_steps
        changes = {
            "output_dir": str(self._folder(candidate.name, gradients)),
            "learning_rate": candidate.learning_rate, "max_steps": max(1, updates),
        }  # fmt: skip
        with finished_run(self._model, candidate.method, self._args, given=self._given, **changes) as trainer:
            trainer.evaluate()
            evaluation = trainer.outcome.evaluator.last["eval"]
            assert evaluation.rows is not None  # ``tuning_identity`` has counted the labels
            nll = [round(value, 6) for value in evaluation.rows.nll.tolist()]
            if lost := sum(not math.isfinite(value) for value in nll):
                raise FloatingPointError(f"the NLL of {lost} held-out rows is not a finite number")
            trainer.save_model()
            metrics = {name: evaluation.metrics[name] for name in KEPT if name in evaluation.metrics}
            fitted = trainer.posterior.config.calibration
            if "temperature" in fitted:  # a regression has none
                metrics["temperature"] = fitted["temperature"]
            return metrics, nll, evaluation.rows.terms.tolist()
