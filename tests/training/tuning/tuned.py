"""A tiny classifier to tune, and runs that are made to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import default_data_collator

from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.repeated_runs import finished_run
from hf_bayes.training.tuning import trials
from hf_bayes.training.tuning.candidates import Candidate
from hf_bayes.training.tuning.tune import Tuning, tune
from tests import runs
from tests.tiny_models import tiny_bert

CANDIDATES = (
    Candidate("slow", MAPConfig(prior_std=1.0), 1e-6),
    Candidate("plain fine-tuning", MAPConfig(prior_std=1.0), 3e-2),
    Candidate("ensemble", EnsembleConfig(num_chains=2, prior_std=1.0), 3e-2, cost=2),
    Candidate("impossible", HMCConfig(num_chains=2)),
)


def learnable(count: int, seed: int) -> Dataset:
    """Return rows of one token six times, with two classes of tokens."""
    rows = runs.token_rows(count, length=1, seed=seed)
    repeated = [{name: 6 * value for name, value in row.items()} for row in rows]
    return Dataset.from_list([{**row, "labels": int(row["input_ids"][0] > 10)} for row in repeated])


def arguments(directory: Path, **settings: Any) -> BayesianTrainingArguments:
    fields = {
        "learning_rate": None, "max_steps": -1, "per_device_eval_batch_size": 100, "per_device_train_batch_size": 8,
    }  # fmt: skip
    return runs.arguments(directory, **fields | settings)


def call(
    directory: Path,
    candidates: Sequence[Candidate] = CANDIDATES,
    *,
    model: Any = None,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Tuning:
    """Tune a tiny classifier. ``settings`` are training arguments, and ``changes`` other arguments of ``tune``."""
    given: dict[str, Any] = {
        "train_dataset": learnable(80, 0), "eval_dataset": learnable(200, 1), "budget": 4000, "subspace": "last_layer",
        "data_collator": default_data_collator,
    }  # fmt: skip
    return tune(model or tiny_bert(), arguments(directory, **settings or {}), candidates=candidates, **given | changes)


def only_failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *methods: str) -> list[str]:
    """Make runs of these methods fail. Return the list in which the methods of all runs will be."""
    run, names = finished_run, []

    def run_or_fail(model: Any, method: Any, *args: Any, **options: Any) -> Any:
        names.append(method.name)
        if method.name in methods:
            raise error
        return run(model, method, *args, **options)

    monkeypatch.setattr(trials, "finished_run", run_or_fail)
    return names
