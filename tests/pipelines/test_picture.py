from __future__ import annotations

import io
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from hf_bayes.pipelines.picture import COLUMNS, to_picture
from hf_bayes.pipelines.rendering import LIGHT


def record(*words: str, prompt: str = "") -> dict[str, Any]:
    numbers = {"id": 5, "logprob": -1.0, "total": 1.0, "aleatoric": 0.0, "epistemic": 1.0}
    means = {"total": 1.0, "aleatoric": 0.0, "epistemic": 1.0, "sequence_logprob": -1.0,
             "sequence_logprob_tokenwise": -1.0}  # fmt: skip
    tokens = [{"token": word, **numbers} for word in words]
    return {"text": prompt + "".join(words), "tokens": tokens, "uncertainty": means}


def drawn(given: dict[str, Any]) -> list[str]:
    return [text.get_text() for text in to_picture(given).axes[0].texts]


def test_every_token_has_its_colour_and_the_prompt_has_none() -> None:
    axes = to_picture(record(" is", " here", prompt="It")).axes[0]
    assert [text.get_text() for text in axes.texts][:3] == ["It", " is", " here"]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() == 0.88]
    assert [to_hex(box.get_facecolor()) for box in boxes] == [LIGHT.levels[-1].background] * 2


def test_long_lines_and_line_breaks_go_on_below() -> None:
    figure = to_picture(record("a" * COLUMNS + "b", "\nc"))
    places = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    assert places["a" * COLUMNS] == (0, 0.5)
    assert places["b"] == (0, 1.5)


def test_dollars_and_controls_are_plain_text() -> None:
    given = record("$x_1$", "\x1b[31m")
    assert drawn(given)[0] == "$x_1$"
    assert "\x1b" not in "".join(drawn(given))
    file = io.BytesIO()
    to_picture(given).savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="measure is one of"):
        to_picture(record("a"), measure="entropy")
