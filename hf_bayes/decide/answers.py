"""The uncertainty of a whole answer, from the record that a pipeline returns for a generated or a scored text.

Numbers are in nats, of the tokens of the answer. Each is higher for a less certain answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Record = Mapping[str, Any]

P_TRUE_PROMPT = (
    "Question: {question}\nPossible answer: {answer}\nIs the possible answer:\n (A) True\n (B) False\n"
    "The possible answer is:"
)
"""The question of Kadavath et al. 2022 (section 4.1), without examples."""


class AnswerUncertainty(NamedTuple):
    """The uncertainties of an answer; their names are the measures of an ``Abstention``.

    Attributes:
        nll_per_token: -log p(answer) / number of tokens, p the posterior predictive of the sequence
            (``sequence_logprob``). Its exponential is the answer's perplexity.
        largest_epistemic: the largest EU of a token.
        total, aleatoric, epistemic: means over the tokens.
    """

    nll_per_token: float
    largest_epistemic: float
    total: float
    aleatoric: float
    epistemic: float


def answer_uncertainty(record: Record) -> AnswerUncertainty:
    """Return the uncertainties of the text of a record.

    Args:
        record: a record of the pipeline "bayesian-text-generation", or of its ``score``.
    Raises:
        ValueError: for a record without tokens, or of another pipeline.
    """
    tokens, means = record.get("tokens"), record.get("uncertainty", {})
    if not tokens or "sequence_logprob" not in means:
        raise ValueError(
            f"an answer's uncertainty needs a record with tokens, got the keys {sorted(record)}: give a record of "
            "bayesian-text-generation, or of its score"
        )
    return AnswerUncertainty(
        nll_per_token=-means["sequence_logprob"] / len(tokens),
        largest_epistemic=max(token["epistemic"] for token in tokens),
        total=means["total"],
        aleatoric=means["aleatoric"],
        epistemic=means["epistemic"],
    )


def p_true(
    score: Callable[..., Any],
    question: str,
    answer: str,
    *,
    prompt: str = P_TRUE_PROMPT,
    true: str = " (A)",
    false: str = " (B)",
) -> float:
    """Return the probability that the model gives to "true" when it is asked about an answer (Kadavath et al. 2022).

    It is p(true) / (p(true) + p(false)), with the posterior predictives of both continuations.

    Args:
        score: the method ``score`` of a text generation pipeline.
        prompt: a text with the fields {question} and {answer}.
        true, false: the continuations that mean yes and no.
    """
    asked = prompt.format(question=question, answer=answer)
    records = [score(text, prompt=asked) for text in (true, false)]
    yes, no = (record["uncertainty"]["sequence_logprob"] for record in records)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))
