"""lm-evaluation-harness with a saved posterior. It is no dependency: ``make test-doors`` has an environment with it."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_bayes import Posterior, pipeline
from tests.cli.commands.conftest import posterior  # noqa: F401 - a fixture
from tests.pipelines.harness_task import DOCUMENTS, write_tasks
from tests.tiny_models import TEXTS

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="lm_eval is no dependency: make test-doors")

CONTEXTS = [("The mitochondrion is the", " powerhouse of the cell."), ("Langevin", " dynamics"), ("", "A chain")]


def model(place: str, **options: Any) -> Any:
    from hf_bayes.pipelines.lm_harness import BayesianHarnessLM

    return BayesianHarnessLM(place, device="cpu", **options)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args, task_name="test")


@pytest.mark.parametrize(
    ("per_token", "field"), [(False, "sequence_logprob"), (True, "sequence_logprob_tokenwise")], ids=["whole", "sum"]
)
def test_an_answer_has_the_log_probability_of_score(posterior: str, per_token: bool, field: str) -> None:  # noqa: F811
    found = model(posterior, per_token=per_token, batch_size=2).loglikelihood([request(*each) for each in CONTEXTS[:2]])
    records = [pipeline(model=posterior).score(answer, prompt=context) for context, answer in CONTEXTS[:2]]
    for each, record in zip(found, records, strict=True):
        assert each[0] == pytest.approx(record["uncertainty"][field], rel=1e-6)  # float32, and padded rows
        assert each.epistemic == pytest.approx(record["uncertainty"]["epistemic"], abs=1e-6)


def test_an_answer_without_a_context_follows_the_first_token(posterior: str) -> None:  # noqa: F811
    (found,) = model(posterior).loglikelihood([request(*CONTEXTS[2])])
    record = pipeline(model=posterior).score("<s>" + CONTEXTS[2][1])
    assert found[0] == pytest.approx(record["uncertainty"]["sequence_logprob"], rel=1e-6)


def test_a_text_has_the_sum_of_its_tokens(posterior: str) -> None:  # noqa: F811
    found = model(posterior).loglikelihood_rolling([request(text) for text in TEXTS[:2]])
    records = pipeline(model=posterior).score(["<s>" + text for text in TEXTS[:2]])
    wanted = [record["uncertainty"]["sequence_logprob_tokenwise"] for record in records]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_the_sum_over_windows_is_that_of_the_model_hf(posterior: str) -> None:  # noqa: F811
    """lm_eval's own model on the logits of the mixture."""
    from lm_eval.models.huggingface import HFLM

    ours = model(posterior, per_token=True, max_length=8)
    theirs = HFLM(ours.model, tokenizer=ours.tokenizer, backend="causal", max_length=8)
    texts = [request(TEXTS[0])]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-6)
    answers = [request(*each) for each in CONTEXTS[1:]]
    assert [each[0] for each in ours.loglikelihood(answers)] == pytest.approx(
        [each[0] for each in theirs.loglikelihood(answers)], abs=1e-5
    )


def test_tasks_are_evaluated_with_uncertainty(posterior: str, tmp_path: Path) -> None:  # noqa: F811
    from lm_eval.tasks import TaskManager

    from hf_bayes.pipelines.lm_harness import evaluate

    found = evaluate(
        model="hf_bayes",
        model_args={"pretrained": posterior},
        device="cpu",
        tasks=["tiny_choice", "tiny_text"],
        task_manager=TaskManager(include_path=write_tasks(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    metrics, samples = found["results"]["tiny_choice"], found["samples"]["tiny_choice"]
    assert 0 <= metrics["epistemic,none"] <= math.log(2)
    assert 0 <= metrics["ece,none"] <= 1
    assert [sample["doc"]["text"] for sample in samples] == [each["text"] for each in DOCUMENTS]
    assert all(0 <= sample["epistemic"] <= math.log(2) for sample in samples)
    assert found["results"]["tiny_text"]["word_perplexity,none"] > 1
    config = Posterior.from_pretrained(posterior).config
    assert (found["config"]["method"], found["config"]["num_members"]) == (config.method, 2)


def test_text_is_generated_as_by_the_pipeline(posterior: str) -> None:  # noqa: F811
    (found,) = model(posterior).generate_until([request("Langevin", {"until": ["\n\n"], "max_gen_toks": 5})])
    settings = {"do_sample": False, "max_new_tokens": 5, "return_full_text": False}
    assert found == pipeline(model=posterior)("Langevin", **settings)[0]["generated_text"]


@pytest.mark.parametrize("batch_size", ["auto", 0, "many"])
def test_a_batch_size_is_a_number(posterior: str, batch_size: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="batch_size is how many rows go through all members at a time"):
        model(posterior, batch_size=batch_size)


def test_an_answer_longer_than_the_context_is_refused(posterior: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"an answer has \d+ tokens, and the model's context has 4"):
        model(posterior, max_length=4).loglikelihood([request("A", TEXTS[0])])


def test_the_entry_point_names_the_model() -> None:
    from hf_bayes.pipelines.lm_harness import BayesianHarnessLM

    points = importlib.metadata.entry_points(group="lm_eval.models", name="hf_bayes")
    if not points:
        pytest.skip("hf_bayes is not installed, only on the path")
    assert next(iter(points)).load() is BayesianHarnessLM
