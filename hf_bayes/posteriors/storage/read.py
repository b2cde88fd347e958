"""Read a directory. A file is parsed only after its place, kind, size and hash have been checked."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from hf_bayes.posteriors.file_formats import CHECKPOINT_FOLDERS
from hf_bayes.posteriors.storage.formats import MAX_TEXT, decode, read_header
from hf_bayes.posteriors.storage.listing import some
from hf_bayes.posteriors.storage.manifest import (
    MANIFEST,
    MAX_JSON,
    PENDING,
    POSTERIOR,
    Entry,
    Manifest,
    check_is_directory,
    check_name,
    parse_manifest,
    unlisted_files,
)

Shapes = Mapping[str, Mapping[str, tuple[int, ...]] | Callable[[Mapping[str, Any]], None]]
"""The name of a safetensors file -> the shape of each tensor in it.

A function takes the place of shapes that depend on the file. Its argument is the header. It raises ValueError to refuse
the file, before a large file is read.
"""

_ATTEMPTS = 50  # to read a directory that is saved again meanwhile


def read_directory(
    directory: str | os.PathLike[str],
    *,
    format: str,
    only: Callable[[str], bool] | None = None,
    raw: Callable[[str], bool] = lambda name: False,
    expected: Callable[[Mapping[str, Any], list[str]], Shapes] | None = None,
) -> dict[str, Any]:
    """Return the content of a directory that ``write_directory`` wrote, after every byte is checked by the manifest.

    A cached snapshot of the Hub can be read: its files are links into the cache's blobs. No other link may leave the
    directory.

    Args:
        directory: a local directory.
        format: the format that the manifest must have.
        only: a test of the names to read. All other files must exist with the listed size. None reads all files.
        raw: a test of the names to return as bytes.
        expected: a function that returns the shapes of the tensors in some or all safetensors files. Its arguments are
            the content of all other files, which are read first, and all names in the manifest. A safetensors file
            with another size or header is refused. The function raises ValueError to refuse the directory.
    Returns:
        name -> named tensors (``.safetensors``), object (``.json``) or bytes (``raw`` names and other suffixes).
    Raises:
        OSError: if there is no directory, or no manifest in it.
        ValueError: naming the file, what was found and what was expected.
    """
    root = Path(directory)
    check_is_directory(root)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist")
    root = Path(os.path.realpath(root))
    for attempt in range(_ATTEMPTS):
        before = _generation(root)
        try:
            return _read(root, read_manifest(root, format), only, raw, expected)
        except (OSError, ValueError):
            if _generation(root) == before:
                raise
        time.sleep(0.002 * attempt)
    raise TimeoutError(f"{root} is being rewritten faster than it can be read: read it after the save")


def listed_files(directory: str | os.PathLike[str], *, format: str) -> dict[str, Entry]:
    """Return the files that the manifest lists. Raises the errors of ``read_directory`` about a manifest."""
    return read_manifest(Path(os.path.realpath(directory)), format).files


def read_file(directory: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return one safetensors or JSON file of a directory without a manifest, such as a plain peft adapter.

    Raises:
        OSError, ValueError: as ``read_directory``, except that no hash is checked.
    """
    content: dict[str, Any] = decode(name, read_bytes(directory, name), where=str(Path(directory) / name))
    return content


def read_bytes(directory: str | os.PathLike[str], name: str) -> bytes:
    """Return the bytes of a file of a directory without a manifest; a link out of the directory is refused.

    Raises:
        OSError, ValueError: as ``read_inside``.
    """
    root = Path(os.path.realpath(directory))
    check_name(name)
    return read_inside(root, root / name)


def _generation(root: Path) -> tuple[Any, ...]:
    """Return a value that differs after each step of a save that a reader could notice."""
    try:
        info = (root / MANIFEST).stat()
    except OSError:
        return (None,)
    return info.st_ino, info.st_mtime_ns, any(root.glob(f"{PENDING}*"))


def read_manifest(root: Path, format: str) -> Manifest:
    """Return the manifest of a directory, given by its real path.

    Raises:
        OSError: if there is no manifest.
        ValueError: if the manifest is damaged, or has another format.
    """
    path = root / MANIFEST
    if not os.path.lexists(path):
        if format == POSTERIOR and fnmatch(root.name, CHECKPOINT_FOLDERS):
            raise FileNotFoundError(
                f"{root} holds no {MANIFEST}: it is a checkpoint, from which a run resumes (resume_from_checkpoint). "
                f"The posterior is in {root.parent} once the run has ended: give that folder"
            )
        raise FileNotFoundError(f"{root} holds no {MANIFEST}: it is not a {format}, or its first save never ended")
    manifest = parse_manifest(read_inside(root, path, limit=MAX_JSON), root)
    if manifest.format != format:
        raise ValueError(f"{path}: format is {manifest.format!r}, expected {format!r}")
    return manifest


def _read(
    root: Path,
    manifest: Manifest,
    only: Callable[[str], bool] | None,
    raw: Callable[[str], bool],
    expected: Callable[[Mapping[str, Any], list[str]], Shapes] | None,
) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    shapes: Shapes = {}
    tensors = [name for name in manifest.files if name.endswith(".safetensors")]
    for name in (name for name in manifest.files if name not in tensors):
        data = _read_listed(root, manifest, name, only, None)
        if data is not None:
            contents[name] = data if raw(name) else decode(name, data, where=str(root / name))
    if expected is not None:
        try:
            shapes = expected(contents, list(manifest.files))
        except ValueError as error:
            raise ValueError(f"{root}: {error}") from error
    for name in tensors:
        wanted = shapes.get(name)
        data = _read_listed(root, manifest, name, only, wanted)
        if data is not None:
            fixed = None if callable(wanted) else wanted
            contents[name] = decode(name, data, where=str(root / name), shapes=fixed)
    unlisted = unlisted_files(root, manifest.files)
    # Between commit and the end of step 3, files of the old save are still there.
    if unlisted and not (root / (PENDING + manifest.digest)).exists():
        raise ValueError(f"{root} holds {some(unlisted)}, not listed in {MANIFEST}: move it away")
    return contents


def _read_listed(
    root: Path,
    manifest: Manifest,
    name: str,
    only: Callable[[str], bool] | None,
    shapes: Mapping[str, tuple[int, ...]] | Callable[[Mapping[str, Any]], None] | None,
) -> bytes | None:
    """Return the bytes of one file of the manifest after a check of the hash, or None if ``only`` leaves it out."""
    entry, path, reads = manifest.files[name], root / name, only is None or only(name)
    limit, check = None, None
    if callable(shapes):
        check = shapes
    elif shapes is not None:
        limit = MAX_TEXT + 8 * sum(math.prod(shape) for shape in shapes.values())
    pending = root / (PENDING + manifest.digest) / name
    try:
        data = read_inside(root, pending, entry=entry, limit=limit, reads=reads, check=check)
    except FileNotFoundError:
        try:
            data = read_inside(root, path, entry=entry, limit=limit, reads=reads, check=check)
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing, {MANIFEST} lists it: fetch or save the directory again") from error
    if not reads:
        return None
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise ValueError(
            f"{path}: sha256 mismatch: got {digest}, {MANIFEST} lists {entry.sha256}. The file is damaged or was "
            "exchanged: fetch or save the directory again"
        )
    return data


def read_inside(
    root: Path,
    path: Path,
    *,
    entry: Entry | None = None,
    limit: int | None = None,
    reads: bool = True,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> bytes:
    """Return the bytes of a regular file. It must lie in ``root`` or in the blobs of the Hub cache around ``root``.

    Args:
        root: the real path of the directory.
        path: the file. Its real path is checked.
        entry: the size that the file must have. None accepts any size.
        limit: the largest size in bytes.
        reads: False checks the file without reading it, and returns no bytes.
        check: a check of the header of a large safetensors file, before the file is read.
    Raises:
        OSError: if the file is missing or cannot be read.
        ValueError: if the file lies elsewhere, is not regular, or has a wrong size.
    """
    real = os.path.realpath(path, strict=True)
    if not any(os.path.commonpath([real, base]) == base for base in _allowed_roots(root)):
        raise ValueError(f"{path} is a link to {real}, outside of {root}: refused")
    # Non-blocking: opening a named pipe would otherwise hang.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    if not stat.S_ISREG(os.lstat(real).st_mode):
        raise ValueError(f"{path} is not a regular file: refused")
    with open(os.open(real, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is not a regular file: refused")
        size = info.st_size
        if entry is not None and size != entry.size:
            raise ValueError(
                f"{path} has {size:,} bytes, {MANIFEST} lists {entry.size:,}: it is damaged. "
                "Fetch or save the directory again"
            )
        if limit is None and path.suffix != ".safetensors":
            limit = MAX_JSON
        if limit is not None and size > limit:
            raise ValueError(f"{path} has {size:,} bytes, expected at most {limit:,}: refused")
        if not reads:
            return b""
        if path.suffix == ".safetensors" and size > MAX_TEXT:
            header = _check_size(file, size, where=str(path))
            if check is not None:
                check(header)
        return file.read(size)


def _check_size(file: BinaryIO, size: int, *, where: str) -> dict[str, Any]:
    """Compare the size of a file with its header, before a large file is read. Return the header."""
    start = file.read(8)
    start += file.read(min(int.from_bytes(start, "little"), MAX_TEXT))
    header = read_header(start, where)
    ends = [entry["data_offsets"] for entry in header.values()]
    try:
        expected = len(start) + max((end for _, end in ends), default=0)
    except (TypeError, ValueError):
        expected = 0
    if expected != size:
        raise ValueError(f"{where} is not a valid safetensors file: {size:,} bytes, {expected:,} by its header")
    file.seek(0)
    return header


def _allowed_roots(root: Path) -> list[str]:
    """Return ``root``, and for ``<repository>/snapshots/<revision>`` in a Hub cache also ``<repository>/blobs``."""
    allowed = [str(root)]
    for repository in root.parents:
        blobs = repository / "blobs"
        snapshots = repository / "snapshots"
        if snapshots in root.parents and blobs.is_dir() and os.path.realpath(blobs) == str(blobs):
            allowed.append(str(blobs))
    return allowed
