"""The file of the Hub's evaluation results: a posterior's figure on a benchmark (``.eval_results/*.yaml``).

The Hub shows the figure on the model's page and in the leaderboard of the benchmark, which is a data set that the Hub
lists as one. The format has one value for each benchmark and task, so calibration stands in its notes; the model card
has all figures (``card_results``). Like the card, the file is not part of the verified posterior. The Hub's format has
no place for the fingerprint of the posterior, which is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from hf_bayes.core.number_checks import is_number
from hf_bayes.posteriors.card_results import NAMES, POSTERIOR, stamp
from hf_bayes.posteriors.compat import is_repo_id

FOLDER = ".eval_results"
"""The folder in a repository where the Hub looks for evaluation results."""
_NOTED = ("nll", "calibrated_nll", "ece", "brier")


class Benchmark(NamedTuple):
    """A task of a benchmark, and the metric whose value it ranks."""

    dataset: str
    task: str
    metric: str

    @classmethod
    def parse(cls, text: str) -> Benchmark:
        """Return the benchmark of "user/set:task:metric".

        Raises:
            ValueError: for a text of another form.
        """
        parts = text.split(":")
        fits = len(parts) == 3 and "/" in parts[0] and is_repo_id(parts[0])
        if not fits or not all(re.fullmatch(r"[\w.-]+", part) for part in parts[1:]):
            raise ValueError(
                f"a benchmark is given as dataset:task:metric, such as user/set:default:accuracy, got {text!r:.200}"
            )
        return cls(*parts)

    @property
    def file(self) -> str:
        """The name of the file of its result, in the repository."""
        return f"{FOLDER}/{f'{self.dataset}-{self.task}'.replace('/', '-')}.yaml"


def benchmark_result(benchmark: Benchmark, evaluation: Mapping[str, Any]) -> str:
    """Return the content of the file of an evaluation on a benchmark.

    Args:
        benchmark: the benchmark whose rows the evaluation has read; this is not checked.
        evaluation: the results of ``hf-bayes evaluate``, as ``card_results.read_evaluation`` returns them.
    Raises:
        ValueError: if the evaluation lacks the metric.
    """
    value = evaluation.get(benchmark.metric)
    if not is_number(value):
        known = ", ".join(name for name in NAMES if is_number(evaluation.get(name)))
        raise ValueError(f"the results have no figure {benchmark.metric!r} for {benchmark.dataset}: use one of {known}")
    noted = [f"{name} {evaluation[name]:.4g}" for name in _NOTED if is_number(evaluation.get(name))]
    members = [f"mixture of {evaluation['members']} members"] if is_number(evaluation.get("members")) else []
    entry = EvalResultEntry(
        dataset_id=benchmark.dataset, task_id=benchmark.task, value=value,
        notes=", ".join([f"{benchmark.metric} of hf_bayes", *members, *noted]),
    )  # fmt: skip
    content = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
    return f"# {stamp(evaluation[POSTERIOR])}\n{content}"
