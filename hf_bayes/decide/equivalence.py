"""Equivalences: functions that decide which answers mean the same, for ``semantic_entropy``.

An equivalence takes two texts and returns a bool. ``same_text`` needs no model. ``similar_embeddings`` and
``entails_both_ways`` take a function that calls a model of the user's choice.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Equivalence = Callable[[str, str], bool]

_ONE_SIGN = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63", "-"),
        "\u2264": "<=",
        "\u2265": ">=",
    }
)
"""Quotation marks, dashes, minus and comparisons -> the signs of a keyboard."""

_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
_MIXED = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")
"""The place between a whole number and a fraction."""

_OTHER = r"(?:[^\w\s]|_)"
_AMOUNT = r"(?:[a-z]{0,3}[$\u00a2-\u00a5\u0e3f\u20a0-\u20cf] ?)?\.?\d"  # an optional currency
_MARKS = re.compile(
    rf"((?<=\d){_OTHER}+(?=\d)"  # between two digits
    rf"|(?<![\w.])(?:-\.?(?=\d)|-(?={_AMOUNT})|\.(?=\d))"  # a minus or a point in front
    r"|(?<=\de)-(?=\d)"  # the minus of an exponent
    rf"|(?<![-=])[<>]=?\s*(?=-?{_AMOUNT}))"  # a comparison
    rf"|{_OTHER}"
)
"""A character that is neither of a word nor a space; group 1 holds those of a number."""


def same_text(one: str, other: str) -> bool:
    """Return True if two texts agree but for case, punctuation, ASCII symbols such as "$", and the number of spaces.

    The forms of one character are equal (Unicode's NFKC), as are straight and curly quotation marks, and all dashes.
    Marks between two digits are part of a number, as are a minus sign and a point before its first digit or its
    currency, the minus of an exponent, and "<" and ">" in front: "3.5" differs from "35", "1,000" from "1000", "-$5"
    from "$5", "2e-3" from "2e3", and "<5" from ">5".
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
    # NFKC alone would make 102 of 10 squared, and 21/2 of two and a half
    text = _RAISED.sub(lambda found: "^" + unicodedata.normalize("NFKC", found[0]), text)
    text = unicodedata.normalize("NFKC", _MIXED.sub(" ", text).translate(_ONE_SIGN)).casefold()
    text = text.replace("\u2044", "/")  # the fraction slash, which NFKC writes
    return " ".join(_MARKS.sub(lambda found: (found[1] or _kept(found[0])).rstrip(), text).split())


def _kept(character: str) -> str:
    """Return the character, or nothing for punctuation (Unicode's category P and all of ASCII's)."""
    is_mark = character in string.punctuation or unicodedata.category(character).startswith("P")
    return "" if is_mark else character
