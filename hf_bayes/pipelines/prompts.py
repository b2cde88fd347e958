"""Prompts of answers that are scored: one for each answer, and the place in the tokens where the answer begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_bayes.posteriors.storage.json_types import is_texts


def prompts_of(prompt: str | Iterable[str], num_texts: int) -> list[str]:
    """Return a prompt for each text.

    Raises:
        ValueError: for another number of prompts than texts, and for prompts that are not strings.
    """
    prompts = [prompt] * num_texts if isinstance(prompt, str) else list(prompt) if isinstance(prompt, Iterable) else []
    if len(prompts) != num_texts or not is_texts(prompts):
        raise ValueError(
            f"prompt is a string, or a string for each of the {num_texts} texts, got {prompt!r:.100}: give one prompt "
            "for all texts, or a list of the same length"
        )
    return prompts


def require_offsets(tokenizer: Any) -> None:
    """Raise a ValueError for a tokenizer that cannot find the tokens of an answer in the joined text."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"an answer after a prompt needs a tokenizer that reports where tokens stand in the text, and "
            f"{type(tokenizer).__name__} does not: load a fast tokenizer, or give ids to "
            "model.score(input_ids, first=number of tokens of the prompt)"
        )


def answer_start(offsets: Sequence[Sequence[int]], prompt: str, answer: str) -> int:
    """Return the place of the first token that has a character of the answer.

    Args:
        offsets: (begin, end) in the joined text of each token; special tokens have (0, 0).
    Raises:
        ValueError: if the answer has no token, or its first token is the first of all, which nothing predicts.
    """
    first = next((place for place, (_, end) in enumerate(offsets) if end > len(prompt)), len(offsets))
    if first == len(offsets):
        raise ValueError(
            f"the answer {answer!r:.100} has no token after its prompt: give a text, and no truncation that removes it"
        )
    if first == 0:
        raise ValueError(
            f"no token stands before the answer {answer!r:.100}, and a causal model predicts a token from those before "
            f"it: give a prompt of one token or more (got {prompt!r:.100}), or leave the prompt out"
        )
    return first
