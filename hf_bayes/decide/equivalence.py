"""Equivalences: functions that decide which answers mean the same, for ``semantic_entropy``.

An equivalence takes two texts and returns a bool. ``same_text`` needs no model. ``similar_embeddings`` and
``entails_both_ways`` take a function that calls a model of the user's choice.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Equivalence = Callable[[str, str], bool]

_MARK = f"[{re.escape(string.punctuation)}]"
_MARKS = re.compile(rf"((?<=\d){_MARK}+(?=\d)|(?<![\w.])(?:-\.?|\.)(?=\d))|{_MARK}")
"""A mark of punctuation; group 1 holds the marks of a number: between two digits, or a sign or point in front."""


def same_text(one: str, other: str) -> bool:
    """Return True if two texts agree but for case, punctuation and spaces.

    Punctuation between two digits is part of a number, as are a minus sign and a point before its first digit: "3.5"
    differs from "35", "1,000" from "1000", and "-5" from "5".
    """
    return _plain(one) == _plain(other)


def similar_embeddings(embed: Callable[[list[str]], Tensor], *, similarity: float = 0.9) -> Equivalence:
    """Return an equivalence by the cosine of sentence embeddings.

    Args:
        embed: texts -> [N, p], for example an encoder's mean of its last hidden states. It is called once for a text.
        similarity: the smallest cosine of equivalent texts. The right value depends on the encoder.
    """

    @functools.lru_cache(maxsize=4096)
    def direction(text: str) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.normalize(embed([text])[0].double(), dim=0)

    return lambda one, other: bool(direction(one) @ direction(other) >= similarity)


def entails_both_ways(entails: Callable[[str, str], bool], *, question: str = "") -> Equivalence:
    """Return the equivalence of Kuhn et al. 2023 (section 3.2): each text, after the question, entails the other.

    Args:
        entails: (premise, hypothesis) -> True if a model of natural language inference sees entailment.
        question: the question that both texts answer.
    """

    def after(text: str) -> str:
        return f"{question} {text}".strip()

    return lambda one, other: entails(after(one), after(other)) and entails(after(other), after(one))


def clusters(texts: Sequence[str], equivalent: Equivalence) -> list[int]:
    """Return the number of each text's cluster. A text is compared with the first text of each cluster."""
    firsts: list[str] = []
    numbers = []
    for text in texts:
        place = next((i for i, first in enumerate(firsts) if equivalent(text, first)), len(firsts))
        if place == len(firsts):
            firsts.append(text)
        numbers.append(place)
    return numbers


def _plain(text: str) -> str:
    return " ".join(_MARKS.sub(lambda found: found[1] or "", text.lower()).split())
