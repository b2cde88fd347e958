"""A script's arguments: from the command line, from a YAML or JSON file, or from a file with overrides."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_bayes.config import MethodConfig
from hf_bayes.methods import from_dict


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-4 for a string; everybody who writes a learning rate means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_arguments(*types: Any, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One object of each dataclass: ``script FILE``, ``script --config FILE [--field value ...]`` or fields alone.

    FILE is a .yaml, .yml or .json mapping of field names to values; fields given on the command line win over it.

    Args:
        types: dataclasses, as for transformers' ``HfArgumentParser``.
        arguments: the command line, ``sys.argv[1:]`` by default.
    Raises:
        ValueError: for a file that is no mapping, or a field that no dataclass has.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) == 1 and Path(given[0]).suffix in (".yaml", ".yml", ".json"):
        given = ["--config", *given]
    if "--config" in given:
        place = given.index("--config")
        if place + 1 == len(given):
            raise ValueError("--config needs a file")
        file = given[place + 1]
        # First the file, then the flags: of two equal flags argparse takes the last.
        given = [*_as_flags(_read(file), types, where=file), *given[:place], *given[place + 2 :]]
    parser = HfArgumentParser(types)
    return tuple(parser.parse_args_into_dataclasses(args=given, look_for_args_file=False))


def mapping(fields: dict[str, Any] | str | None) -> dict[str, Any]:
    """Fields from a file (a mapping), from the command line (the JSON of one) or not given.

    Raises:
        ValueError: for text that is no JSON mapping.
    """
    if isinstance(fields, str):
        try:
            fields = json.loads(fields)
        except json.JSONDecodeError as error:
            raise ValueError(f"fields must be JSON such as '{{\"prior_std\": 0.1}}', got {fields!r}") from error
    if fields is not None and not isinstance(fields, dict):
        raise ValueError(f"fields must be a mapping, got {fields!r}")
    return fields or {}


def method_config(name: str, fields: dict[str, Any] | str | None = None) -> MethodConfig:
    """The config of a method from its name and its fields, see ``mapping``.

    Raises:
        ValueError: for an unknown method or field, or a refused value.
    """
    return from_dict({**mapping(fields), "name": name})


def _read(file: str) -> dict[str, Any]:
    text = Path(file).read_text()
    content = json.loads(text) if file.endswith(".json") else yaml.load(text, _Loader)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a mapping of fields to values, got {type(content).__name__}")
    return content


def _as_flags(values: dict[str, Any], types: Sequence[Any], *, where: str) -> list[str]:
    """As if typed: the parser then checks choices and converts, alike for files and for the command line."""
    defaults = {field.name: field.default for kind in types for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise ValueError(f"{where} has fields that this script does not know: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            if defaults[name] is not None:
                raise ValueError(f"{where}: {name} cannot be null; leave it out for its default")
            continue
        items = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *(json.dumps(i) if isinstance(i, (dict, bool)) else str(i) for i in items)]
    return flags
