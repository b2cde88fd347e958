from __future__ import annotations

from hf_bayes.posteriors.storage.listing import shown, some

SEVEN = list("abcdefg")


def test_five_names_are_shown_and_the_others_counted() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some(SEVEN[:5]) == "a, b, c, d, e"
    assert some(SEVEN) == "a, b, c, d, e and 2 more"
    assert shown(name for name in SEVEN) == "['a', 'b', 'c', 'd', 'e'] and 2 more"


def test_a_very_long_name_is_cut() -> None:
    assert shown(["x" * 5_000]) == repr(["x" * 1_000])
