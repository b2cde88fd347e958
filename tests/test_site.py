"""The site of the documentation: no page is missing from its menu, and no public name from its reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hf_bayes
from docs.site_hooks import on_page_markdown, on_post_page
from scripts.run_tutorials import NAMES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from pages(entry)


def test_every_page_is_in_the_menu_once() -> None:
    menu = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    tutorials = [f"tutorials/{name}.md" for name in NAMES]
    assert sorted(menu) == sorted([*(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")), *tutorials])


def test_the_reference_has_every_public_name_once() -> None:
    names = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: hf_bayes\.(\w+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    ]
    assert sorted(names) == sorted(hf_bayes.__all__)


def long_lines(text: str, width: int = 100) -> list[str]:
    """Return the lines of a page that are too long; rows of tables, and a URL alone on its line, may be longer."""
    lines = [line for line in text.splitlines() if len(line) > width]
    return [line for line in lines if not re.fullmatch(r"\s*(\|.*|<?https?://\S+)", line)]


def test_lines_of_pages_have_at_most_100_characters() -> None:
    assert {page.name: found for page in DOCS.rglob("*.md") if (found := long_lines(page.read_text("utf-8")))} == {}
    words = "word " * 20 + "longer"  # the broken twin
    assert long_lines(f"{words}\n| {words} |\nhttps://{'long' * 30}\n{'x' * 100}\nSee https://{'long' * 30}") == [
        words,
        f"See https://{'long' * 30}",
    ]


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[here](../README.md)", "here"),
        ("results/golds.md", "[here](../choose.md#a)", "[here](../choose.md#a)"),
        ("results/golds.md", "[here](../../README.md)", "here"),
        ("README.md", "[here](tutorials/generate.py)", "[here](tutorials/generate.md)"),
        ("results/golds.md", "[here](../tutorials/generate.py#a)", "[here](../tutorials/generate.md#a)"),
    ],
)
def test_links_lead_to_pages_or_become_text(page: str, text: str, expected: str) -> None:
    assert on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page))) == expected


def shown(text: str) -> str:
    return on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri="README.md")))


def test_a_diagram_of_layers_needs_no_script() -> None:
    page = shown((DOCS / "architecture.md").read_text("utf-8"))
    assert "mermaid" not in page
    assert (
        page.index("<code>cli</code>") < page.index("<code>fit</code> <code>training</code>") < page.index("<code>core")
    )
    with pytest.raises(ValueError, match="expected a diagram of layers"):
        shown("```mermaid\nflowchart TD\n    a --> b\n    c --> d\n```")


def test_only_diagrams_of_layers_are_drawn() -> None:
    others = [page.name for page in DOCS.rglob("*.md") if "```mermaid" in shown(page.read_text("utf-8"))]
    assert others == []


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://unpkg.com/mermaid@11/dist/mermaid.min.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', True),
        ("<img src=https://example.org/badge.svg>", True),
        ('<a href="https://example.org">elsewhere</a><img src="images/heat_map.png">', False),
        ('<link rel="canonical" href="https://example.org/">', False),
    ],
)
def test_a_page_that_loads_from_another_server_is_refused(html: str, loads: bool) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    if not loads:
        assert on_post_page(html, page=page) == html
        return
    with pytest.raises(ValueError, match=r"page.md loads .* must work offline"):
        on_post_page(html, page=page)
