"""The manifest, the names that may stand in it, and which files it answers for."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_bayes.posteriors.storage.formats import decode_json, some

MANIFEST = "manifest.json"
FORMAT_VERSION = 1  # of the manifest
POSTERIOR = "hf_bayes.posterior"
"""The format of a posterior directory."""
Content = Mapping[str, Tensor] | Mapping[str, Any] | str | bytes
"""The content of a file, by its suffix: ``.safetensors`` named tensors, ``.json`` one object, ``.md`` a text.

Bytes are written as they are, under any suffix; a file of another suffix can only be bytes.
"""

PREFIX = "_hf_bayes_"  # transformers never uploads names that begin with an underscore
STAGING = f"{PREFIX}staging-"
PENDING = f"{PREFIX}pending-"
MAX_JSON = 64 * 2**20
"""The largest file in bytes that is read, of all files but tensors."""
MAX_BESIDE_TENSORS = 256 * 2**20
"""Bytes of all files but tensors together."""
SUFFIXES = (".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".tiktoken", ".codes")
"""Names end in one of these: tensors, JSON, texts, and the vocabularies and templates of tokenizers. None is code."""
_NAME = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*(?:{'|'.join(map(re.escape, SUFFIXES))})"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """What the manifest says of a file."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """A parsed manifest: what the directory is, its files, the digests of the texts as written, and its own digest."""

    format: str
    files: dict[str, Entry]
    texts: dict[str, str]
    digest: str


def parse_manifest(data: bytes, root: Path) -> Manifest:
    """The manifest of ``root``.

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
    if not all(isinstance(values[key], kind) for key, kind in (("format", str), ("files", dict), ("texts", dict))):
        raise ValueError(f"{where}: format must be a text, files and texts must be objects")
    files = {}
    for name, entry in values["files"].items():
        check_name(name, where=where)
        if not isinstance(entry, dict) or set(entry) != {"size", "sha256"}:
            raise ValueError(f"{where}: the entry of {name} must have size and sha256, got {entry!r:.200}")
        size, sha256 = entry["size"], entry["sha256"]
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise ValueError(f"{where}: the entry of {name} is not a size and a sha256: {entry!r:.200}")
        files[name] = Entry(size, sha256)
    for name in values["texts"]:
        check_name(name, where=where)
    beside = sum(entry.size for name, entry in files.items() if not name.endswith(".safetensors"))
    if beside > MAX_BESIDE_TENSORS:
        raise ValueError(
            f"{where} lists {beside:,} bytes of files beside the tensors, expected at most {MAX_BESIDE_TENSORS:,}: "
            "refused before any is read"
        )
    return Manifest(values["format"], files, values["texts"], hashlib.sha256(data).hexdigest())


def unlisted_files(root: Path, listed: Mapping[str, Any]) -> list[str]:
    """Files that a reader of adapters would take for part of the directory, though no manifest lists them.

    These are tensors at the top, and anything in ``members/`` or a directory that the manifest has files in. The rest
    (checkpoints, logs, notes) is the user's, and is never read.
    """
    found = [path.name for path in root.glob("*.safetensors")]
    for top in {"members", *(name.split("/")[0] for name in listed if "/" in name)}:
        if (root / top).is_symlink():
            found.append(top)
            continue
        for parent, directories, names in os.walk(root / top):
            links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
            found += [(Path(parent) / name).relative_to(root).as_posix() for name in names + links]
    return sorted(set(found) - set(listed))


def check_name(name: str, where: str | None = None) -> None:
    """Refuse what is not a relative path of plain names: nothing absolute, no ``..``, nothing hidden."""
    if not isinstance(name, str) or len(name) > 255 or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where + ': ' if where else ''}{name!r:.300} is not a relative path of plain names ending in one of "
            f"{', '.join(SUFFIXES)}: such a file is neither written nor read"
        )


def check_is_directory(root: Path) -> None:
    """Refuse a file where a directory is expected; nothing at all is fine."""
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, f"{root} is a file, expected a directory: choose another path", str(root)
        )
