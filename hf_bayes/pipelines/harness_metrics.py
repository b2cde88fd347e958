"""Uncertainty of the documents of an evaluation by lm-evaluation-harness, and metrics of it.

The package ``lm_eval`` is not imported here. ``lm_harness`` gives it ``Answer`` as responses, and its results come back
with two more metrics, for tasks that choose an answer or score one:

* ``epistemic``, in nats: for a choice of answers, the mutual information I(answer; theta) of the members' distributions
  over the answers; for a single answer, the mean EU of its tokens.
* ``ece``, for a choice of answers: expected calibration error of the most probable answer.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_bayes.metrics.functions import expected_calibration_error
from hf_bayes.uncertainty.decomposition import decompose


class Answer(tuple[float, bool]):
    """The pair (log-likelihood, whether it is the greedy answer) that lm_eval reads, with two more attributes.

    Attributes:
        epistemic: the mean EU of the answer's tokens in nats.
        member_logprobs: the log-probability of the answer under each member.
    """

    epistemic: float
    member_logprobs: tuple[float, ...]

    def __new__(cls, loglikelihood: float, is_greedy: bool, epistemic: float, members: Sequence[float]) -> Answer:
        answer = super().__new__(cls, (loglikelihood, is_greedy))
        answer.epistemic, answer.member_logprobs = epistemic, tuple(members)
        return answer

    def __getnewargs__(self) -> tuple[float, bool, float, tuple[float, ...]]:  # for lm_eval's cache of answers
        return (*self, self.epistemic, self.member_logprobs)


def document_uncertainty(answers: Sequence[Any]) -> dict[str, float]:
    """Return ``epistemic``, and for a choice of answers ``confidence``, of one document's answers.

    Args:
        answers: the responses of a model; a document whose responses are no ``Answer`` has no uncertainty.
    """
    if not answers or not all(isinstance(answer, Answer) for answer in answers):
        return {}
    if len(answers) == 1:
        return {"epistemic": answers[0].epistemic}
    members = torch.tensor([answer.member_logprobs for answer in answers], dtype=torch.float64).T  # [M, answers]
    shares = torch.tensor([answer[0] for answer in answers], dtype=torch.float64).softmax(0)
    return {"epistemic": decompose(members).epistemic.item(), "confidence": shares.max().item()}


def add_uncertainty(results: dict[str, Any]) -> None:
    """Add ``epistemic`` and ``ece`` to the results of ``lm_eval.simple_evaluate``, which have samples.

    Each sample gets ``epistemic`` and ``confidence``, too. ``ece`` needs the metric ``acc``.
    """
    for task, samples in results["samples"].items():
        for sample in samples:
            sample.update(document_uncertainty(sample["filtered_resps"]))
        for name in {sample["filter"] for sample in samples}:
            _add_means(results, task, name, [sample for sample in samples if sample["filter"] == name])


def _add_means(results: dict[str, Any], task: str, name: str, samples: list[dict[str, Any]]) -> None:
    """Add the metrics of the documents of one task and one filter."""
    metrics = results["results"][task]
    better = results.setdefault("higher_is_better", {}).setdefault(task, {})
    values = [sample["epistemic"] for sample in samples if "epistemic" in sample]
    if values:
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else "N/A"
        metrics |= {f"epistemic,{name}": statistics.fmean(values), f"epistemic_stderr,{name}": error}
        better["epistemic"] = False
    chosen = [sample for sample in samples if "confidence" in sample and "acc" in sample]
    if chosen:
        confidence, correct = ([sample[key] for sample in chosen] for key in ("confidence", "acc"))
        metrics |= {f"ece,{name}": expected_calibration_error(confidence, correct), f"ece_stderr,{name}": "N/A"}
        better["ece"] = False


def with_uncertainty(simple_evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``lm_eval.simple_evaluate`` with the metrics of ``add_uncertainty``."""

    @functools.wraps(simple_evaluate)
    def evaluating(*args: Any, log_samples: bool = True, **kwargs: Any) -> Any:
        results = simple_evaluate(*args, log_samples=True, **kwargs)
        if results is not None:  # only the first process has results
            add_uncertainty(results)
            if not log_samples:
                results.pop("samples")
        return results

    return evaluating
