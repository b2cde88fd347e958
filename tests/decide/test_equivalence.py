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
