"""Safe display of text from files that somebody else wrote.

The files of a posterior hold verdicts, names and labels. When a terminal prints such text, a control character may move
the cursor, set the title of the window or hide earlier text, and a bidirectional override may reverse the order of
letters. These functions replace such characters by their code, such as U+001B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# C0 and C1 controls except tab and newline, surrogates, line and paragraph separators, directional marks, embeddings,
# overrides and isolates, noncharacters of the first plane
_ACTING = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"
)
# Default_Ignorable_Code_Point of Unicode, without the characters above: they take no space on the screen
_INVISIBLE = (
    r"\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200c\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0e\ufeff"
    r"\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# a joiner between two pictographs makes one picture, and a selector after a pictograph sets its colours: both show
_PICTOGRAPH = r"\u2190-\u2bff\U0001f000-\U0001faff"
_IDLE = rf"(?<![{_PICTOGRAPH}\ufe0f])\u200d|\u200d(?![{_PICTOGRAPH}])|(?<![{_PICTOGRAPH}])\ufe0f"
ACTING = re.compile(f"[{_ACTING}]")
"""A pattern for characters that change how the text around them is displayed."""
HIDDEN = re.compile(f"[{_ACTING}{_INVISIBLE}]|{_IDLE}")
"""A pattern for these characters and for characters that are invisible."""
_BREAKS = re.compile(f"[\t\n{_ACTING}]")


def code(match: re.Match[str]) -> str:
    """Return the code of a matched character as visible text, such as "U+200B"."""
    return f"U+{ord(match[0]):04X}"


def visible(text: str) -> str:
    """Return ``text`` with codes in place of all characters that act on terminals or on the text around them.

    Tabs and newlines stay.
    """
    return ACTING.sub(code, text)


def visible_line(text: object) -> str:
    """Return ``visible(str(text))`` on one line: tabs and newlines become codes, too."""
    return _BREAKS.sub(code, str(text))


def is_plain_line(text: str) -> bool:
    """Return whether ``text`` is one line without characters that act on terminals."""
    return _BREAKS.search(text) is None


@contextmanager
def readable_errors() -> Iterator[None]:
    """Apply ``visible`` to the errors of the block and to their causes; also works as a decorator."""
    try:
        yield
    except Exception as error:
        for each in _chain(error):
            each.args = tuple(visible(part) if isinstance(part, str) else part for part in each.args)
            for name in ("strerror", "filename"):  # the message of an OSError uses these two, if they are set
                if isinstance(part := getattr(each, name, None), str):
                    setattr(each, name, visible(part))
        raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and its contexts."""
    left, seen = [error], set()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [other for other in (each.__cause__, each.__context__) if other is not None]
