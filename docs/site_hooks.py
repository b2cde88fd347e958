"""Hooks of MkDocs: the pages of the tutorials, and links to files that the site does not have.

A tutorial is a notebook in jupytext's percent format, ``tutorials/NAME.py``. Its page shows its text, its code, and
below each cell what the cell printed when ``scripts/run_tutorials.py`` ran it. Beside the page is the notebook.
Of a link to a file outside the folder of the documentation, the text stays.

The site works without a network. So a diagram of layers in Mermaid becomes plain HTML here, because the theme would
load Mermaid from another server, and a page that loads anything from another server ends the build.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.run_tutorials import FOLDER, NAMES, OUTPUTS, cells_of

TUTORIAL = re.compile(r"\]\(((?:\.\./)*tutorials/\w+)\.py(#[^)]*)?\)")
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")
DIAGRAM = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?((?:https?:)?//[^\s"'>]*)"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^\s"'>]*)"""
)
"""It finds what a browser loads with a page from another server."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page without links out of the folder of the documentation, and with pages of tutorials."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        return match[1] if posixpath.normpath(posixpath.join(folder, match[2])).startswith("..") else match[0]

    markdown = markdown.replace("± ", "±\N{NO-BREAK SPACE}")  # a narrow cell breaks its line before the sign only
    return DIAGRAM.sub(layers, TUTORIAL.sub(r"](\1.md\2)", LINK.sub(inside, markdown)))


def layers(diagram: re.Match[str]) -> str:
    """Return a diagram of layers as HTML. Each line ``a & b --> c`` begins with the layer that the last one ends with.

    Raises:
        ValueError: for a diagram of another form.
    """
    ends = [line.strip().split(" --> ") for line in diagram[1].splitlines()]
    if any(len(end) != 2 for end in ends) or [lower for _, lower in ends[:-1]] != [upper for upper, _ in ends[1:]]:
        raise ValueError(f"expected a diagram of layers, from the highest to the lowest, got {diagram[0]!r}")
    rows = (names.split(" & ") for names in (ends[0][0], *(lower for _, lower in ends)))
    shown = ("<div>" + " ".join(f"<code>{name}</code>" for name in row) + "</div>" for row in rows)
    return f'<figure class="layers">\n{"<div>↓</div>".join(shown)}\n</figure>'


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Check that a page loads nothing from another server.

    Raises:
        ValueError: naming the address.
    """
    if found := LOADED.search(output):
        address = next(filter(None, found.groups()))
        raise ValueError(f"{page.file.src_uri} loads {address}, and the site must work offline: make it a local file")
    return output


def tutorial(name: str) -> str:
    """Return the page of a tutorial in Markdown."""
    outputs = iter(json.loads(OUTPUTS.read_text("utf-8"))[name])
    parts = []
    for cell in cells_of((FOLDER / f"{name}.py").read_text("utf-8")):
        parts.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        printed = next(outputs)["printed"] if cell.is_code else ""
        if printed:
            parts.append(f'```text title="printed"\n{printed}\n```')
    heading, rest = "\n\n".join(parts).split("\n", 1)
    return f"{heading}\n\n[This page as a notebook]({name}.ipynb){{ download }}\n{rest}\n"


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add the page and the notebook of each tutorial."""
    import jupytext
    from mkdocs.structure.files import File

    for name in NAMES:
        notebook = jupytext.writes(jupytext.read(FOLDER / f"{name}.py", fmt="py:percent"), fmt="ipynb")
        files.append(File.generated(config, f"tutorials/{name}.md", content=tutorial(name)))
        files.append(File.generated(config, f"tutorials/{name}.ipynb", content=notebook))
    return files
