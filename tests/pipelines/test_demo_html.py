from __future__ import annotations

import pytest

from hf_bayes.pipelines.demo_html import styles, tokens_html

TOKENS = [
    {"token": " cell", "id": 5, "logprob": -0.1, "total": 0.5, "aleatoric": 0.4, "epistemic": 0.1},
    {"token": "<b>&", "id": 6, "logprob": -3.0, "total": 3.0, "aleatoric": 2.2, "epistemic": 0.8},
]


def shown(**changes: object) -> str:
    settings = {"measure": "epistemic", "threshold": 0.5, "num_members": 4} | changes
    return tokens_html("user/posterior", "The <i>", TOKENS, **settings)  # type: ignore[arg-type]


def test_texts_of_models_and_users_are_escaped() -> None:
    page = shown(error="<script>")
    assert "&lt;b&gt;&amp;" in page
    assert "The &lt;i&gt;" in page
    assert "&lt;script&gt;" in page
    assert "<b>&" not in page


@pytest.mark.parametrize(("measure", "threshold", "count"), [("epistemic", 0.5, 1), ("total", 0.4, 2), ("total", 3, 0)])
def test_tokens_above_the_threshold_are_marked(measure: str, threshold: float, count: int) -> None:
    page = shown(measure=measure, threshold=threshold)
    assert page.count('class="t u') == 2
    assert page.count(" marked") == count
    assert f"{count} of 2" in page


def test_the_table_has_the_numbers_and_their_means() -> None:
    page = shown()
    for number in ("0.800", "2.200", "3.000", "0.450", "1.300", "1.750"):
        assert f">{number}</td>" in page
    assert "log 4 = 1.39 is the largest possible" in page


def test_a_running_text_without_tokens_shows_the_prompt_only() -> None:
    page = tokens_html("a", "prompt", (), measure="epistemic", threshold=0.5, running=True)
    assert 'data-running="true"' in page
    assert "<table>" not in page


def test_the_styles_have_a_colour_for_every_level_and_theme() -> None:
    assert styles().count(".u24 {") == 2
