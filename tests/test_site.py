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
from docs.site_hooks import on_page_markdown
from scripts.run_tutorials import NAMES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """YAML with the names of Python functions that MkDocs allows, which are not resolved here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from pages(entry)


def test_every_page_is_in_the_menu_once() -> None:
    menu = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]))
    tutorials = [f"tutorials/{name}.md" for name in NAMES]
    assert sorted(menu) == sorted([*(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")), *tutorials])


def test_the_reference_has_every_public_name_once() -> None:
    names = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: hf_bayes\.(\w+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    ]
    assert sorted(names) == sorted(hf_bayes.__all__)


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
