"""The manifest of a directory: its format, the file names that it may hold, and the files that it must list."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_bayes.core.number_checks import is_integer
from hf_bayes.posteriors.storage.formats import decode_json
from hf_bayes.posteriors.storage.json_types import has_keys
from hf_bayes.posteriors.storage.listing import some

MANIFEST = "manifest.json"
FORMAT_VERSION = 1  # of the manifest
POSTERIOR = "hf_bayes.posterior"
"""The format of a posterior directory."""

PREFIX = "_hf_bayes_"  # transformers never uploads names that begin with an underscore
STAGING = f"{PREFIX}staging-"
PENDING = f"{PREFIX}pending-"
MAX_JSON = 64 * 2**20
"""The largest size in bytes of a file that is not safetensors."""
MAX_BESIDE_TENSORS = 256 * 2**20
"""The largest total size in bytes of all files that are not safetensors."""
SUFFIXES = (".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".tiktoken", ".codes")
"""The allowed suffixes: tensors, JSON, texts, and the vocabularies and templates of tokenizers. None is code."""
_NAME = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*(?:{'|'.join(map(re.escape, SUFFIXES))})"
)


_SHA256 = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """The size and hash that a manifest records for a file."""

    size: int
    sha256: str

    @classmethod
    def parse(cls, size: Any, sha256: Any) -> Entry | None:
        """Return the entry of two JSON values, or None if they are not a size and a sha256."""
        fine = is_integer(size, low=0) and isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        return cls(size, sha256) if fine else None


class Manifest(NamedTuple):
    """A parsed manifest.

    Attributes:
        format: the kind of directory, such as "hf_bayes.posterior".
        files: name -> entry of each verified file.
        texts: name -> sha256 of each text as the save wrote it. Users may edit texts.
        digest: sha256 of the manifest itself.
    """

    format: str
    files: dict[str, Entry]
    texts: dict[str, str]
    digest: str


def parse_manifest(data: bytes, root: Path) -> Manifest:
    """Return the manifest of ``root``.

    Raises:
        ValueError: naming the key or entry that is wrong.
    """
    where = str(root / MANIFEST)
    values = decode_json(data, where=where)
    keys = {"format", "format_version", "files", "texts"}
    if set(values) != keys:
        raise ValueError(f"{where}: expected the keys {sorted(keys)}, got {some(sorted(values))}")
    if type(values["format_version"]) is not int or values["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version is {values['format_version']!r}, this version of hf_bayes reads {FORMAT_VERSION}"
        )
    types = {"format": str, "files": dict, "texts": dict}
    if not all(isinstance(values[key], kind) for key, kind in types.items()):
        raise ValueError(f"{where}: format must be a text, files and texts must be objects")
    files = {}
    for name, entry in values["files"].items():
        check_name(name, where=where)
        if not has_keys(entry, ("size", "sha256")):
            raise ValueError(f"{where}: the entry of {name} must have size and sha256, got {entry!r:.200}")
        parsed = Entry.parse(**entry)
        if parsed is None:
            raise ValueError(f"{where}: the entry of {name} is not a size and a sha256: {entry!r:.200}")
        files[name] = parsed
    for name in values["texts"]:
        check_name(name, where=where)
    beside = sum(entry.size for name, entry in files.items() if not name.endswith(".safetensors"))
    if beside > MAX_BESIDE_TENSORS:
        raise ValueError(
            f"{where} lists {beside:,} bytes of files beside the tensors, expected at most {MAX_BESIDE_TENSORS:,}: "
            "refused before any is read"
        )
    return Manifest(values["format"], files, values["texts"], hashlib.sha256(data).hexdigest())


def own_folders(listed: Iterable[str]) -> set[str]:
    """Return the folders of which a reader of the directory takes every file for part of it."""
    return {"members", *(name.split("/")[0] for name in listed if "/" in name)}


def unlisted_files(root: Path, listed: Mapping[str, Any]) -> list[str]:
    """Return the files that a reader of adapters would take for part of the directory, but that are not ``listed``.

    These are safetensors files at the top, and every file in ``members/`` or in a directory with listed files. All
    other files (checkpoints, logs, notes) belong to the user and are never read.
    """
    found = [path.name for path in root.glob("*.safetensors")]
    for top in own_folders(listed):
        if (root / top).is_symlink():
            found.append(top)
            continue
        for parent, directories, names in os.walk(root / top):
            links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
            found += [(Path(parent) / name).relative_to(root).as_posix() for name in names + links]
    return sorted(set(found) - set(listed))


def check_name(name: str, where: str | None = None) -> None:
    """Refuse a name that is not a relative path of plain names: nothing absolute, no ``..``, nothing hidden."""
    if not isinstance(name, str) or len(name) > 255 or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where + ': ' if where else ''}{name!r:.300} is not a relative path of plain names ending in one of "
            f"{', '.join(SUFFIXES)}: such a file is neither written nor read"
        )


def check_is_directory(root: Path) -> None:
    """Refuse a file where a directory is expected. A missing path is accepted."""
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root} is a file, expected a directory: choose another path")
