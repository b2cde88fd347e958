"""A seal: the sizes and hashes of files that another library wrote, written beside them as the last file of a save.

``write_directory`` writes its own files and needs no seal. A seal is for files that are there already, under names and
in formats that are not ours, such as Trainer's ``optimizer.pt``. It is one JSON object:

    {"format": ..., "format_version": 1, "files": {name: {"size": ..., "sha256": ...}}}

A save removes the old seal first (``unseal``), writes its files, and seals them. So a directory with a seal holds the
files of one whole save, and a directory without one holds an unfinished save.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.formats import decode_json, encode_json
from hf_bayes.posteriors.storage.manifest import MAX_JSON, STAGING, Entry
from hf_bayes.posteriors.storage.read import read_inside
from hf_bayes.posteriors.storage.write import Alone, Group, _together

SEAL_VERSION = 1
_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def seal(
    directory: str | os.PathLike[str],
    names: Sequence[str],
    *,
    file: str,
    format: str,
    group: Group | None = None,
) -> None:
    """Put these files on the disk, hash them, and write the seal in one step; the first process does, and all wait.

    Args:
        directory: holds the files, those of all processes.
        names: relative names of the files.
        file: the name of the seal.
        format: what the directory is, such as "hf_bayes.checkpoint".
        group: the processes; all of them have written their files when the first one begins. None means one process.
    Raises:
        OSError: naming the file that is missing or cannot be read, or the path that cannot be written. On every
            process, if the first one fails.
    """
    group = group or Alone()
    _together(group, lambda: None)
    _together(group, lambda: _seal(Path(directory), names, file, format) if group.rank == 0 else None)


def _seal(root: Path, names: Sequence[str], file: str, format: str) -> None:
    entries = {name: _put_on_disk(root / name) for name in names}
    content = {"format": format, "format_version": SEAL_VERSION, "files": entries}
    staged = root / f"{STAGING}{file}"
    staged.unlink(missing_ok=True)  # a killed save has left it
    data = encode_json(content, where=file)
    with disk.explaining(root, len(data)):
        disk.write(staged, data)
        os.replace(staged, root / file)
        disk.fsync(root)


def unseal(directory: str | os.PathLike[str], *, file: str) -> None:
    """Remove the seal, if there is one, before the files it lists are replaced."""
    root = Path(directory)
    if (root / file).is_symlink() or (root / file).exists():
        (root / file).unlink()
        disk.fsync(root)


def check_seal(directory: str | os.PathLike[str], *, file: str, format: str) -> dict[str, Entry]:
    """Check every listed file against the seal and return what it lists.

    Raises:
        FileNotFoundError: if the seal or a listed file is missing.
        ValueError: naming the file that is damaged, exchanged or outside of the directory.
    """
    root = Path(os.path.realpath(directory))
    if not os.path.lexists(root / file):
        raise FileNotFoundError(
            errno.ENOENT, f"{root} lacks {file}: its save never ended, or another version wrote it", str(root / file)
        )
    entries = _parse(read_inside(root, root / file, limit=MAX_JSON), where=str(root / file), format=format)
    for name, entry in entries.items():
        path = root / name
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, f"{root} lacks {name}, which {file} lists", str(path))
        data = read_inside(root, path, limit=max(entry.size, MAX_JSON))
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ValueError(
                f"{path} is not the file that {file} lists (got {len(data):,} bytes, expected {entry.size:,} with "
                f"sha256 {entry.sha256[:12]}...): it is damaged or was exchanged"
            )
    return entries


def _put_on_disk(path: Path) -> dict[str, Any]:
    """Write a file's pages to the disk, as the seal promises them, and return its entry."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        data = opened.read()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _parse(data: bytes, *, where: str, format: str) -> dict[str, Entry]:
    values = decode_json(data, where=where)
    if set(values) != {"format", "format_version", "files"} or not isinstance(values["files"], dict):
        raise ValueError(f"{where}: expected the keys format, format_version and files, got {sorted(values)!r:.200}")
    if (values["format"], values["format_version"]) != (format, SEAL_VERSION):
        raise ValueError(
            f"{where}: got format {values['format']!r:.100} version {values['format_version']!r:.100}, expected "
            f"{format!r} version {SEAL_VERSION}"
        )
    entries = {}
    for name, entry in values["files"].items():
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if (
            not _NAME.fullmatch(name)
            or not (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
            or not (isinstance(sha256, str) and _SHA256.fullmatch(sha256))
        ):
            raise ValueError(f"{where}: {name!r:.100} is no plain relative name with a size and a sha256")
        entries[name] = Entry(size, sha256)
    return entries
