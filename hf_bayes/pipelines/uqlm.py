"""Log-probabilities of answers in the form of UQLM (``uqlm``), so that its white-box scorers run on a posterior.

A result of UQLM is a list of {"token", "logprob"} for each answer. The first and the last line of this example need the
package ``uqlm``::

    from uqlm import WhiteBoxUQ
    results = logprobs_results(generate, prompts, answers)
    scores = asyncio.run(WhiteBoxUQ(scorers=["sequence_probability"]).score(logprobs_results=results))

UQLM needs transformers below 5 and numpy below 2 (its version 0.6.7, on Python below 3.13), so it cannot stand in one
environment with hf_bayes. The results are plain lists: write them as JSON here, and read them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from torch import Tensor

from hf_bayes.pipelines.continuations import read_answers


class TokenLogprob(TypedDict):
    """A token as the tokenizer writes it, and the logarithm of its probability."""

    token: str
    logprob: float


def logprobs_results(generate: Any, prompts: Sequence[str], answers: Sequence[str]) -> list[list[TokenLogprob]]:
    """Return the tokens of each answer with their log-probabilities under the mixture: UQLM's ``logprobs_results``.

    Args:
        generate: a pipeline of texts with a posterior, ``hf_bayes.pipeline(model=...)``.
        prompts, answers: one answer for each prompt.
    Raises:
        ValueError: as ``read_answers``.
    """
    found = read_answers(generate, prompts, answers)
    return [_tokens(generate, answer.ids, answer.scores.logprobs) for answer in found]


def member_logprobs_results(
    generate: Any, prompts: Sequence[str], answers: Sequence[str]
) -> list[list[list[TokenLogprob]]]:
    """Return the same under each member, [answers][members][tokens]: UQLM's ``sampled_logprobs_results``.

    Each member scores the same answer, so ``sampled_responses`` of UQLM has each answer as often as there are members.
    """
    found = read_answers(generate, prompts, answers)
    return [[_tokens(generate, answer.ids, row) for row in answer.scores.member_logprobs] for answer in found]


def _tokens(generate: Any, ids: list[int], logprobs: Tensor) -> list[TokenLogprob]:
    names = generate.tokenizer.convert_ids_to_tokens(ids)
    return [{"token": name, "logprob": value} for name, value in zip(names, logprobs.tolist(), strict=True)]
