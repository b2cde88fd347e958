from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from hf_bayes.posteriors.markdown import markdown
from tests.posteriors.hostile import HOSTILE


def shown(source: str) -> str:
    """Return the rendered text of a table cell with ``source``, by CommonMark with tables."""
    html = (
        MarkdownIt("commonmark", {"html": True}).enable("table").render(f"| a | b |\n|---|---|\n| {source} | end |\n")
    )
    cells = re.findall(r"<td>(.*?)</td>", html, flags=re.DOTALL)
    assert cells[1:] == ["end"], html
    return cells[0]


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_a_text_is_shown_and_does_nothing(text: str) -> None:
    visible = " ".join(
        "".join(c if c.isprintable() else " " if c < "\xa0" or c == "\u2028" else "" for c in text).split()
    )
    plain = MarkdownIt("commonmark", {"html": True}).render(markdown(text))
    expected = visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    assert plain == (f"<p>{expected}</p>\n" if visible else "")
    assert shown(markdown(text)) == expected
