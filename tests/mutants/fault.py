"""A planted fault."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A slip in one place of the package.

    Attributes:
        name: what it is, in words.
        file: within ``hf_bayes``.
        found: a text that stands in the file once.
        put: what is put in its place.
        tests: node ids within ``tests``; each must fail (of a parametrised one without brackets, one of its cases).
    """

    name: str
    file: str
    found: str
    put: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: if the text is not there, or there more than once.
        """
        count = source.count(self.found)
        if count != 1:
            raise ValueError(
                f"fault {self.name!r}: hf_bayes/{self.file} holds its text {count} times, expected once. The code has "
                "moved on: write the fault anew in tests/mutants"
            )
        return source.replace(self.found, self.put)
