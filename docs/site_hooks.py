"""Links of the pages to files outside their folder, which the site does not have: their text stays."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page without links out of the folder of the documentation."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        return match[1] if posixpath.normpath(posixpath.join(folder, match[2])).startswith("..") else match[0]

    return LINK.sub(inside, markdown)
