from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from hf_bayes.pipelines.harness_metrics import Answer, add_uncertainty, document_uncertainty, with_uncertainty


def answer(*members: float, greedy: bool = False, epistemic: float = 0.1) -> Answer:
    """An answer to which each member gives one of these probabilities."""
    logprob = math.log(sum(members) / len(members))
    return Answer(logprob, greedy, epistemic, [math.log(each) for each in members])


def test_an_answer_is_the_pair_that_lm_eval_reads() -> None:
    found = Answer(-2.0, True, 0.5, [-1.0, -3.0])
    logprob, greedy = found
    assert (logprob, greedy) == found == (-2.0, True)
    again = pickle.loads(pickle.dumps(found))  # as lm_eval's cache keeps it
    assert (again, again.epistemic, again.member_logprobs) == ((-2.0, True), 0.5, (-1.0, -3.0))


def test_members_that_choose_differently_disagree_by_log_2() -> None:
    certain = 1e-30  # of the other answer
    apart = document_uncertainty([answer(1.0, certain), answer(certain, 1.0)])
    alike = document_uncertainty([answer(0.5, 0.5), answer(0.5, 0.5)])
    assert apart == pytest.approx({"epistemic": math.log(2), "confidence": 0.5})
    assert alike == pytest.approx({"epistemic": 0.0, "confidence": 0.5}, abs=1e-12)


def test_improbable_answers_are_compared_within_each_member() -> None:
    """Both members prefer the first answer 3 : 1, one of them at probabilities that float64 does not have."""
    low, high = -900.0, -20.0
    choices = [
        Answer(high, False, 0.0, [low + math.log(3), high + math.log(3)]),
        Answer(high - math.log(3), False, 0.0, [low, high]),
    ]
    assert document_uncertainty(choices) == pytest.approx({"epistemic": 0.0, "confidence": 0.75}, abs=1e-9)


def test_an_answer_has_its_tokens_mean_and_a_text_has_none() -> None:
    assert document_uncertainty([answer(0.5, 0.5, epistemic=0.3)]) == {"epistemic": 0.3}
    assert document_uncertainty([-3.0]) == {}
    assert document_uncertainty(["generated"]) == {}


def results() -> dict[str, Any]:
    """Four documents; confidence 0.8 in each, three of them right."""
    pair = [answer(0.8, 0.8), answer(0.2, 0.2)]
    samples = [{"filter": "none", "filtered_resps": pair, "acc": right} for right in (1.0, 1.0, 1.0, 0.0)]
    texts = [{"filter": "none", "filtered_resps": [-3.0]}]
    return {
        "results": {"choice": {"acc,none": 0.75}, "book": {}},
        "samples": {"choice": samples, "book": texts},
        "higher_is_better": {"choice": {"acc": True}},
    }


def test_documents_and_tasks_get_metrics() -> None:
    found = results()
    add_uncertainty(found)
    metrics = found["results"]["choice"]
    assert metrics["ece,none"] == pytest.approx(0.05)  # 0.8 - 3 / 4
    assert metrics["epistemic,none"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["epistemic_stderr,none"] == pytest.approx(0.0, abs=1e-12)
    assert found["higher_is_better"]["choice"] == {"acc": True, "epistemic": False, "ece": False}
    assert found["samples"]["choice"][0]["confidence"] == pytest.approx(0.8)
    assert found["results"]["book"] == {}


@pytest.mark.parametrize("wanted", [True, False])
def test_samples_are_made_for_the_metrics_and_kept_on_request(wanted: bool) -> None:
    evaluate = with_uncertainty(lambda log_samples: results() if log_samples else None)
    found = evaluate(log_samples=wanted)
    assert "ece,none" in found["results"]["choice"]
    assert ("samples" in found) == wanted


def test_other_processes_have_no_results() -> None:
    assert with_uncertainty(lambda log_samples: None)() is None
