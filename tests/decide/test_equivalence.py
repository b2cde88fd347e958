"""Equivalences of answers, and clusters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.decide.equivalence import clusters, entails_both_ways, same_text, similar_embeddings

DIRECTIONS = {"Paris": [1.0, 0.0], "the capital": [1.0, 0.1], "Rome": [0.0, 1.0]}


def test_the_same_text_differs_in_case_and_punctuation_only() -> None:
    assert same_text("Paris.", " paris")
    assert not same_text("Paris", "Rome")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("3.5", "35", False), ("1,000", "1000", False), ("3/4", "34", False), ("10-20", "1020", False),
        ("-5", "5", False), ("x = -5", "x = 5", False), (".5", "5", False), ("-.5", ".5", False),
        ("It is 3.5.", "it is 3.5", True), ("(-5)", "-5!", True), ("...5", "5", True), ("$5", "5", True),
        ("in 1990, 1991", "in 1990 1991", True), ("Covid-19", "covid19", True), ("5-year", "5year", True),
    ],
)  # fmt: skip
def test_punctuation_of_a_number_is_part_of_it(one: str, other: str, same: bool) -> None:
    assert same_text(one, other) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2e-3", "2e3"), ("2E\u22123", "2e3"), ("-$5", "$5"), ("-US$5", "US$5"),
        ("-\u20ac.5", "\u20ac.5"), ("<5", ">5"),
        ("< 5", "5"), ("<=5", ">=5"), ("<-$5", ">-$5"), ("\u22125", "5"), ("10\u00b2", "102"), ("2\u00bd", "21/2"),
        ("-\u00bd", "\u00bd"),
        ("10\u207b\u00b3", "10\u00b3"), ("$5", "\u20ac5"), ("\u0915\u093f", "\u0915"), ("5\u00d73", "53"),
    ],
)  # fmt: skip
def test_signs_of_a_number_make_another_number(one: str, other: str) -> None:
    assert not same_text(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It\u2019s", "It's"), ("\u201cParis\u201d", '"Paris"'), ("\u00abParis\u00bb", "Paris"),
        ("Paris\u2026", "Paris..."),
        ("Paris\u3002", "Paris"), ("\u00bfParis?", "paris"), ("\u22125", "-5"), ("\u20135", "-5"),
        ("3\u20135", "3-5"),
        ("caf\u00e9", "cafe\u0301"), ("\ufb01ne", "fine"), ("\uff15", "5"),
        ("STRASSE", "stra\u00dfe"), ("2\u00bd", "2 1/2"), ("-\u00bd", "-1/2"), ("<5", "< 5"), ("\u22645", "<= 5"),
        ("10\u207b\u00b3", "10^-3"), ("\u22645", "<=5"), ("-$5", "$-5"), ("2e+3", "2e3"),
        ("-> 5", "5"), ("5\u203210", "5'10"),
    ],
)  # fmt: skip
def test_forms_of_one_character_are_the_same(one: str, other: str) -> None:
    assert same_text(one, other)


def test_texts_of_similar_embeddings_are_equivalent() -> None:
    calls = []

    def embed(texts: list[str]) -> Tensor:
        calls.extend(texts)
        return torch.tensor([DIRECTIONS[text] for text in texts])

    equivalent = similar_embeddings(embed, similarity=0.9)
    assert clusters(["Paris", "Rome", "the capital", "Paris"], equivalent) == [0, 1, 0, 0]
    assert sorted(calls) == sorted(DIRECTIONS)  # each text once


def test_entailment_must_hold_both_ways() -> None:
    follows = {("Q? It is Paris", "Q? It is a city"), ("Q? a", "Q? b"), ("Q? b", "Q? a")}
    equivalent = entails_both_ways(lambda one, other: (one, other) in follows, question="Q?")
    assert equivalent("a", "b")
    assert not equivalent("It is Paris", "It is a city")


@pytest.mark.parametrize(("texts", "expected"), [([], []), (["a"], [0]), (["a", "b", "A!", "c"], [0, 1, 0, 2])])
def test_clusters_are_numbered_in_order(texts: list[str], expected: list[int]) -> None:
    assert clusters(texts, same_text) == expected
