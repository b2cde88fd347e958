"""Uncertainties of whole answers, and answers scored after their prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_bayes.decide.answers import P_TRUE_PROMPT, answer_uncertainty, p_true
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors.abstention import ANSWER_MEASURES
from tests.pipelines.built import GREEDY, PROMPTS, bayesian
from tests.posteriors.test_abstention import RULE
from tests.tiny_models import tiny_tokenizer

PROMPT, ANSWER = "A chain that has", " not converged"


@pytest.fixture(scope="module")
def generate() -> Any:
    return pipeline("bayesian-text-generation", bayesian(), tiny_tokenizer())


def test_an_answer_is_scored_given_its_prompt(generate: Any) -> None:
    record = generate.score(ANSWER, prompt=PROMPT)
    ids = generate.tokenizer(PROMPT + ANSWER, return_tensors="pt")["input_ids"]
    first = ids.shape[1] - len(record["tokens"])
    expected = generate.model.score(ids, first=first)
    assert 0 < len(record["tokens"]) < ids.shape[1] - 1
    assert "".join(token["token"] for token in record["tokens"]).strip() == ANSWER.strip()
    assert record["uncertainty"]["sequence_logprob"] == pytest.approx(expected.sequence_logprob.item(), abs=1e-5)
    # the broken twin: the log-probability of prompt and answer together
    whole = generate.score(PROMPT + ANSWER)["uncertainty"]["sequence_logprob"]
    assert abs(whole - record["uncertainty"]["sequence_logprob"]) > 0.1


def test_probabilities_of_prompt_and_answer_multiply_per_token(generate: Any) -> None:
    whole, answer = generate.score(PROMPT + ANSWER)["tokens"], generate.score(ANSWER, prompt=PROMPT)["tokens"]
    for one, other in zip(whole[-len(answer) :], answer, strict=True):
        assert one["id"] == other["id"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-5)  # float32


def test_answers_of_a_list_have_their_own_prompts(generate: Any) -> None:
    found = generate.score([ANSWER, ANSWER], prompt=[PROMPT, PROMPTS[1]])
    assert [record["prompt"] for record in found] == [PROMPT, PROMPTS[1]]
    assert found[0] == generate.score(ANSWER, prompt=PROMPT)
    with pytest.raises(ValueError, match="one text has one prompt"):
        generate.score(ANSWER, prompt=[PROMPT])


def test_the_uncertainty_of_an_answer_is_of_its_tokens(generate: Any) -> None:
    (record,) = generate(PROMPTS[0], **GREEDY)
    found = answer_uncertainty(record)
    epistemic = torch.tensor([token["epistemic"] for token in record["tokens"]])
    assert found.largest_epistemic == pytest.approx(epistemic.max().item())
    assert found.epistemic == pytest.approx(epistemic.mean().item())
    assert found.nll_per_token == pytest.approx(-record["uncertainty"]["sequence_logprob"] / len(epistemic))
    assert set(found._fields) == set(ANSWER_MEASURES)
    with pytest.raises(ValueError, match=r"needs a record with tokens, got the keys \['label'\]"):
        answer_uncertainty({"label": "x"})


@pytest.mark.parametrize("measure", ANSWER_MEASURES)
def test_a_threshold_withholds_generated_and_scored_answers(generate: Any, measure: str) -> None:
    records = [generate(prompt, **GREEDY)[0] for prompt in PROMPTS]
    values = [getattr(answer_uncertainty(record), measure) for record in records]
    middle = dataclasses.replace(RULE, measure=measure, threshold=sorted(values)[1] + 1e-6)
    found = [generate(prompt, abstain=middle, **GREEDY)[0]["abstained"] for prompt in PROMPTS]
    assert found == [value > middle.threshold for value in values]
    scored = generate.score(PROMPTS, abstain=middle)
    assert [record["abstained"] for record in scored] == [
        getattr(answer_uncertainty(record), measure) > middle.threshold for record in scored
    ]
    assert "abstained" not in generate.score(PROMPTS[0])


def test_p_true_compares_two_continuations(generate: Any) -> None:
    found = p_true(generate.score, "What is total?", "aleatoric")
    asked = P_TRUE_PROMPT.format(question="What is total?", answer="aleatoric")
    probs = [generate.score(text, prompt=asked)["uncertainty"]["sequence_logprob"] for text in (" (A)", " (B)")]
    assert found == pytest.approx(torch.tensor(probs).double().softmax(0)[0].item())
    assert p_true(generate.score, "a", "b", true=" (B)", false=" (A)") == pytest.approx(
        1 - p_true(generate.score, "a", "b")
    )
