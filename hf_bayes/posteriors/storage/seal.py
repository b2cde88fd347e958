"""A seal: the sizes and hashes of files that another library wrote. It is the last file of a save.

``write_directory`` writes its own files and needs no seal. A seal lists files that another library has written already,
such as Trainer's ``optimizer.pt``. The seal is one JSON object:

    {"format": ..., "format_version": 1, "files": {name: {"size": ..., "sha256": ...}}}

A save removes the old seal first (``unseal``), writes its files, and seals them. So a directory with a seal holds the
files of one whole save, and a directory without one holds an unfinished save.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.formats import decode_json, encode_json
from hf_bayes.posteriors.storage.group import Alone, Group, together
from hf_bayes.posteriors.storage.manifest import MAX_JSON, STAGING, Entry
from hf_bayes.posteriors.storage.read import read_inside

SEAL_VERSION = 1
_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*")


def seal(
    directory: str | os.PathLike[str],
    names: Sequence[str],
    *,
    file: str,
    format: str,
    group: Group | None = None,
) -> None:
    """Flush these files to the disk, hash them, and write the seal in one step. The first process works, all wait.

    Args:
        directory: the directory with the files of all processes.
        names: relative names of the files.
        file: the name of the seal.
        format: the kind of directory, such as "hf_bayes.checkpoint".
        group: the processes. The first one begins when all have written their files. None means one process.
    Raises:
        OSError: naming the file that is missing or cannot be read, or the path that cannot be written. If the first
            process fails, every process raises.
    """
    group = group or Alone()
    together(group, lambda: None)
    together(group, lambda: _seal(Path(directory), names, file, format) if group.rank == 0 else None)


def _seal(root: Path, names: Sequence[str], file: str, format: str) -> None:
    entries = {name: _put_on_disk(root / name) for name in names}
    content = {"format": format, "format_version": SEAL_VERSION, "files": entries}
    staged = root / f"{STAGING}{file}"
    staged.unlink(missing_ok=True)  # left by a killed save
    data = encode_json(content, where=file)
    with disk.explaining(root, len(data)):
        disk.write(staged, data)
        os.replace(staged, root / file)
        disk.fsync(root)


def unseal(directory: str | os.PathLike[str], *, file: str) -> None:
    """Remove the seal, if there is one, before the listed files are replaced."""
    root = Path(directory)
    if (root / file).is_symlink() or (root / file).exists():
        (root / file).unlink()
        disk.fsync(root)


def check_seal(directory: str | os.PathLike[str], *, file: str, format: str) -> dict[str, Entry]:
    """Check every listed file against the seal and return the entries of the seal.

    Raises:
        FileNotFoundError: if the seal or a listed file is missing.
        ValueError: naming the file that is damaged, exchanged or outside of the directory.
    """
    root = Path(os.path.realpath(directory))
    if not os.path.lexists(root / file):
        raise FileNotFoundError(f"{root} lacks {file}: its save never ended, or another version wrote it")
    entries = _parse(read_inside(root, root / file, limit=MAX_JSON), where=str(root / file), format=format)
    for name, entry in entries.items():
        path = root / name
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{root} lacks {name}, which {file} lists")
        data = read_inside(root, path, limit=max(entry.size, MAX_JSON))
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ValueError(
                f"{path} is not the file that {file} lists (got {len(data):,} bytes, expected {entry.size:,} with "
                f"sha256 {entry.sha256[:12]}...): it is damaged or was exchanged"
            )
    return entries


def _put_on_disk(path: Path) -> dict[str, Any]:
    """Flush a file to the disk and return its entry in the seal."""
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
        parsed = Entry.parse(entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else None
        if parsed is None or not _NAME.fullmatch(name):
            raise ValueError(f"{where}: {name!r:.100} is not a plain relative name with a size and a sha256")
        entries[name] = parsed
    return entries
