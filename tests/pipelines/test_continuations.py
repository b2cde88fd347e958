from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.pipelines.continuations import Continuation, read_answers, read_continuations
from tests.pipelines.built import bayesian
from tests.tiny_models import tiny_tokenizer

ROWS = [([1, 30, 40], [50, 60]), ([1], [9, 8, 7, 6, 5]), ([1, 30, 40, 11, 12, 13], [14]), ([20, 21], [22, 23])]

# rows that are padded in a batch round otherwise in float32
CLOSE: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(scope="module")
def model() -> Any:
    return bayesian()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_continuation_has_the_numbers_of_score(model: BayesianModelForCausalLM, batch_size: int) -> None:
    for (context, answer), found in zip(ROWS, read_continuations(model, ROWS, batch_size=batch_size), strict=True):
        wanted = model.score(torch.tensor([[*context, *answer]]), first=len(context))
        for name in ("logprobs", "total", "aleatoric", "epistemic"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name)[0], **CLOSE)
        assert found.sequence_logprob == pytest.approx(wanted.sequence_logprob.item(), abs=1e-6)
        assert found.sequence_logprob_tokenwise == pytest.approx(wanted.sequence_logprob_tokenwise.item(), abs=1e-6)


def test_members_average_to_both_probabilities(model: BayesianModelForCausalLM) -> None:
    for found in read_continuations(model, ROWS):
        members = found.member_logprobs
        mean = members.exp().mean(0).log()
        torch.testing.assert_close(mean, found.logprobs, **CLOSE)
        whole = members.sum(-1).exp().mean().log().item()
        assert found.sequence_logprob == pytest.approx(whole, abs=1e-5)  # a sum of five float32 numbers near -5


def test_what_generate_draws_greedily_is_greedy(model: BayesianModelForCausalLM) -> None:
    text = model.generate(torch.tensor([[1, 30, 40]]), do_sample=False, max_new_tokens=4, min_new_tokens=4)[0].tolist()
    drawn, changed = text[3:], [*text[3:6], (text[6] + 1) % 300]
    found = read_continuations(model, [(text[:3], drawn), (text[:3], changed)])
    assert [each.is_greedy for each in found] == [True, False]


def test_a_row_may_exceed_the_context_by_one_token(model: BayesianModelForCausalLM) -> None:
    longest = model.config.max_position_embeddings
    (found,) = read_continuations(model, [([1], [5] * longest)])
    assert isinstance(found, Continuation)
    assert len(found.logprobs) == longest


@pytest.mark.parametrize("row", [([], [3]), ([1], [])])
def test_a_row_needs_a_context_and_a_token_to_score(model: BayesianModelForCausalLM, row: Any) -> None:
    with pytest.raises(ValueError, match=r"row 1 needs one token of context and one token to score"):
        read_continuations(model, [([1], [2]), row])


def test_a_closed_form_has_no_member_probabilities(model: BayesianModelForCausalLM, monkeypatch: Any) -> None:
    class Closed:
        def require_members(self, what: str) -> None:
            raise ValueError(f"{what} needs members")

    monkeypatch.setattr(model, "predictor", Closed())
    with pytest.raises(ValueError, match="a continuation's score needs members"):
        read_continuations(model, ROWS)


@pytest.mark.parametrize("batch_size", [0, -1, True])
def test_a_batch_has_a_row_or_more(model: BayesianModelForCausalLM, batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is how many rows .*, got {batch_size}: give 1 or more"):
        read_continuations(model, ROWS, batch_size=batch_size)


@pytest.mark.parametrize("token", [-1, 9999])
def test_a_token_outside_the_vocabulary_is_refused(model: BayesianModelForCausalLM, token: int) -> None:
    with pytest.raises(ValueError, match=rf"row 1 has the token id {token} to score, expected 0 to 319"):
        read_continuations(model, [([3], [4]), ([3, 4], [5, token])])


@pytest.mark.parametrize(("prompts", "answers"), [("The", ["is"]), (["The"], " is"), (["The"], [None])])
def test_a_text_is_no_list_of_texts(prompts: Any, answers: Any) -> None:
    generate = SimpleNamespace(tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="s is a list of strings, got"):
        read_answers(generate, prompts, answers)


def test_a_tokenizer_without_places_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="reports where tokens stand in the text, and SimpleNamespace does not"):
        read_answers(SimpleNamespace(tokenizer=SimpleNamespace()), ["The"], [" is"])
