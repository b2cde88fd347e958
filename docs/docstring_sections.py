"""An extension of griffe, for the reference: a blank line above each section of a docstring.

Our docstrings have none, and griffe's parser would take a section without it for a part of the one above.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises):\n)")


class BlankLines(Extension):
    """Separate the sections of each docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
