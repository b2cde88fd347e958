"""Arguments from the command line, or from a YAML or JSON file.

This module does not import torch, so that commands without a model start quickly.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers.hf_argparser import HfArgumentParser

from hf_bayes.posteriors.storage.json_types import as_list

_CONFIG_FILES = (".yaml", ".yml", ".json")


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps the values of fields as they are written, for the parser of the field.

    YAML 1.1 reads 1e-4 as a text, 010 as 8 and 2020-01-01 as a date. In the mapping that is the value of a field, they
    are a number, 10 and a text here. A key that stands twice in a mapping is refused.
    """

    def fields(self) -> Any:
        """Return the content of the file: the values of a mapping are texts, lists of texts, mappings or None."""
        root = self.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            return None if root is None else self.construct_document(root)
        self._refuse_repeated(root)
        self.flatten_mapping(root)  # "<<" gives fields of another mapping, before the fields that replace them
        pairs = [[self.construct_object(_as_written(node), deep=True) for node in pair] for pair in root.value]
        return {str(name): value for name, value in pairs}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping within the file."""
        self._refuse_repeated(node)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return a decimal number."""
        return int(self.construct_scalar(node))

    def _refuse_repeated(self, node: Any) -> None:
        """Refuse a key that stands twice. YAML would take the last value."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge"):
            if key.value in seen:
                problem = f"{key.value!r} is there twice: leave one out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)


_Loader.yaml_implicit_resolvers = {  # without dates, and with other integers
    first: [(tag, pattern) for tag, pattern in pairs if tag not in (f"{_TAG}timestamp", f"{_TAG}int")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789"))
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


def _as_written(node: Any) -> Any:
    """Return a node whose numbers and truth values are texts. An anchor may have this node elsewhere, too."""
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, [_as_written(each) for each in node.value], node.start_mark, node.end_mark)
    if isinstance(node, yaml.ScalarNode) and node.tag in (f"{_TAG}bool", f"{_TAG}int", f"{_TAG}float"):
        return yaml.ScalarNode(f"{_TAG}str", node.value, node.start_mark, node.end_mark)
    return node


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON, without a key that stands twice. JSON would take the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice: leave one out")
    return found


class _Parser(HfArgumentParser):
    """A parser that raises a ValueError for wrong input, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(*types: Any, arguments: Sequence[str] | None = None, first: str | None = None) -> tuple[Any, ...]:
    """Return one object of each dataclass from ``[--config] FILE [--field value ...]``, or from fields alone.

    FILE is a .yaml, .yml or .json mapping of field names to values. Fields on the command line take precedence.

    Args:
        types: dataclasses, as for transformers' ``HfArgumentParser``.
        arguments: the command line, by default ``sys.argv[1:]``.
        first: the field that a first word without a flag is the value of, unless it is a FILE.
    Raises:
        ValueError: for a file that is not a mapping, a field that no dataclass has, or a value of another type.
        OSError: for a file that cannot be read.
    """
    given = [part for word in (sys.argv[1:] if arguments is None else arguments) for part in _split(word)]
    if given and not given[0].startswith("-"):
        if Path(given[0]).suffix in _CONFIG_FILES:
            given = ["--config", *given]
        elif first is not None:
            given = [f"--{first}", *given]
    if "--config" in given:
        place = given.index("--config")
        if place + 1 == len(given):
            raise ValueError("--config needs a file")
        file = given[place + 1]
        if "--config" in given[place + 1 :]:
            raise ValueError("--config is there twice: put all fields in one file")
        # The file comes before the flags, because argparse takes the last of two equal flags.
        given = [*_as_flags(_read(file), types, where=file), *given[:place], *given[place + 2 :]]
    try:
        *found, rest = _parser(types).parse_args_into_dataclasses(
            args=given, look_for_args_file=False, return_remaining_strings=True
        )
    except json.JSONDecodeError as error:  # of an argument that transformers reads
        raise ValueError(f"expected a mapping in JSON such as '{{\"a\": 1}}', got {error.doc!r}: {error}") from error
    if rest:
        near = difflib.get_close_matches(rest[0], [f"--{each.name}" for each in _fields(types)], n=1)
        advice = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"{rest[0]!r} is no argument of this command: {advice}")
    return tuple(found)


@cache
def _parser(types: tuple[Any, ...]) -> _Parser:
    return _Parser(types, allow_abbrev=False)  # a file of fields knows no abbreviations either


def read_text(file: str) -> str:
    """Return the text of a file, without the byte order mark that some editors put before it.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for a file in another encoding than UTF-8.
    """
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error}): save it in this encoding") from error


def check_count(flag: str, value: int | None, counts: str) -> None:
    """Check the value of a flag that counts something; None is its default.

    Args:
        counts: what it counts, for the error.
    Raises:
        ValueError: if it is below 1.
    """
    if value is not None and value < 1:
        raise ValueError(f"--{flag} must be at least 1, got {value}: it counts {counts}")


def _split(word: str) -> list[str]:
    """Return ``--config=FILE`` as two words, and any other word as it is."""
    return word.split("=", 1) if word.startswith("--config=") else [word]


def _read(file: str) -> dict[str, Any]:
    text = read_text(file)
    try:
        if file.endswith(".json"):
            content = json.loads(text, object_pairs_hook=_without_repeated)
        else:
            content = _Loader(text).fields()
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"{file} must hold a mapping of fields to values, got {found}: write lines such as seed: 1")
    return content


def _fields(types: Sequence[Any]) -> list[dataclasses.Field[Any]]:
    return [each for kind in types for each in dataclasses.fields(kind) if each.init]


def _as_flags(values: dict[str, Any], types: tuple[Any, ...], *, where: str) -> list[str]:
    """Return the command-line flags of these values, so that one parser checks and converts files and flags alike."""
    defaults = {each.name: each.default for each in _fields(types)}
    unknown = [f"{name}" for name in values if name not in defaults]
    if unknown:
        near = difflib.get_close_matches(unknown[0], defaults, n=1)
        advice = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"{where} has fields that this command does not have: {', '.join(unknown)}; {advice}")
    several = {action.dest for action in _parser(types)._actions if action.nargs in ("+", "*")}
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            if defaults[name] is not None:
                raise ValueError(f"{where}: {name} cannot be null; leave it out for its default")
            continue
        if isinstance(value, list) and name not in several:
            raise ValueError(f"{where}: {name} takes one value, got the list {value}: give one of them")
        flags += [f"--{name}", *(_as_word(item, f"{where}: {name}") for item in as_list(value))]
    return flags


def _as_word(value: Any, where: str) -> str:
    """Return a value as a word of the command line."""
    if value is None:
        raise ValueError(f"{where} has a list with null: leave it out")
    if not isinstance(value, (dict, list, bool)):
        return str(value)
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{where} has a value that JSON does not have ({error}): write a text or a number") from error
