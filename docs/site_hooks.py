"""Hooks of MkDocs: the pages of the tutorials, and links to files that the site does not have.

A tutorial is a notebook in jupytext's percent format, ``tutorials/NAME.py``. Its page shows its text, its code, and
below each cell what the cell printed when ``scripts/run_tutorials.py`` ran it. Beside the page is the notebook.
Of a link to a file outside the folder of the documentation, the text stays.
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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page without links out of the folder of the documentation, and with pages of tutorials."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        return match[1] if posixpath.normpath(posixpath.join(folder, match[2])).startswith("..") else match[0]

    return TUTORIAL.sub(r"](\1.md\2)", LINK.sub(inside, markdown))


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
