"""Reading: nothing is parsed before its place, kind, size and hash are right."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hf_bayes.posteriors.storage.formats import MAX_TEXT, decode_json, decode_tensors, read_header, some
from hf_bayes.posteriors.storage.manifest import (
    MANIFEST,
    MAX_JSON,
    PENDING,
    Entry,
    Manifest,
    check_is_directory,
    check_name,
    parse_manifest,
    unlisted_files,
)

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""The name of a safetensors file -> the shape of each tensor in it."""

_ATTEMPTS = 50  # of a reader that writers overtake


def read_directory(
    directory: str | os.PathLike[str],
    *,
    format: str,
    only: Callable[[str], bool] | None = None,
    raw: Callable[[str], bool] = lambda name: False,
    expected: Callable[[Mapping[str, Any], list[str]], Shapes] | None = None,
) -> dict[str, Any]:
    """The content of a directory that ``write_directory`` wrote, each byte checked against the manifest first.

    A cached snapshot of the Hub, whose files are links into the cache's blobs, can be read; no other link may leave the
    directory.

    Args:
        directory: a local directory.
        format: what it must be.
        only: which names to read; others must be there with their size. None reads all.
        raw: which names to return as bytes.
        expected: from the content of the other files, which are read first, and all names in the manifest to the
            shapes of the tensors in some or all safetensors files. A file whose size or header disagrees is not read.
            It raises ValueError for a directory that is not to be read.
    Returns:
        name -> named tensors (``.safetensors``), object (``.json``) or bytes (``raw`` names and other suffixes).
    Raises:
        OSError: if there is no directory, or no manifest in it.
        ValueError: naming the file, what was found and what was expected.
    """
    root = Path(directory)
    check_is_directory(root)
    if not root.exists():
        raise FileNotFoundError(errno.ENOENT, f"{root} does not exist", str(root))
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
    """The files of the manifest. Raises what ``read_directory`` does of a manifest."""
    return read_manifest(Path(os.path.realpath(directory)), format).files


def read_file(directory: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """One safetensors or JSON file of a directory without a manifest, such as a plain peft adapter.

    Raises:
        OSError, ValueError: as ``read_directory``, but for the hash.
    """
    root = Path(os.path.realpath(directory))
    check_name(name)
    return _decode(name, read_inside(root, root / name), where=str(root / name))


def _generation(root: Path) -> tuple[Any, ...]:
    """Differs after each step of a save that a reader could notice."""
    try:
        info = (root / MANIFEST).stat()
    except OSError:
        return (None,)
    return info.st_ino, info.st_mtime_ns, any(root.glob(f"{PENDING}*"))


def read_manifest(root: Path, format: str) -> Manifest:
    """The manifest of a real path, of this format."""
    path = root / MANIFEST
    if not os.path.lexists(path):
        raise FileNotFoundError(
            errno.ENOENT,
            f"{root} holds no {MANIFEST}: it is no {format}, or one whose first save never ended",
            str(root),
        )
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
            contents[name] = data if raw(name) else _decode(name, data, where=str(root / name))
    if expected is not None:
        try:
            shapes = expected(contents, list(manifest.files))
        except ValueError as error:
            raise ValueError(f"{root}: {error}") from error
    for name in tensors:
        data = _read_listed(root, manifest, name, only, shapes.get(name))
        if data is not None:
            contents[name] = _decode(name, data, where=str(root / name), shapes=shapes.get(name))
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
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> bytes | None:
    """Return the bytes of one file of the manifest, their hash checked; None where it is not ``only`` one to read."""
    entry, path, reads = manifest.files[name], root / name, only is None or only(name)
    limit = None if shapes is None else MAX_TEXT + 8 * sum(math.prod(shape) for shape in shapes.values())
    try:
        data = read_inside(root, root / (PENDING + manifest.digest) / name, entry=entry, limit=limit, reads=reads)
    except FileNotFoundError:
        try:
            data = read_inside(root, path, entry=entry, limit=limit, reads=reads)
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing, {MANIFEST} lists it: fetch or save the directory again") from error
    if not reads:
        return None
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise ValueError(
            f"{path}: sha256 mismatch: got {digest}, {MANIFEST} says {entry.sha256}. The file is damaged or was "
            "exchanged: fetch or save the directory again"
        )
    return data


def read_inside(
    root: Path, path: Path, *, entry: Entry | None = None, limit: int | None = None, reads: bool = True
) -> bytes:
    """The bytes of a regular file whose real path lies in ``root``, or in the blobs of the Hub cache around it."""
    real = os.path.realpath(path, strict=True)
    if not any(os.path.commonpath([real, base]) == base for base in _allowed_roots(root)):
        raise ValueError(f"{path} is a link to {real}, outside of {root}: refused")
    # Not blocking: opening a named pipe would otherwise hang.
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
                f"{path} has {size:,} bytes, {MANIFEST} says {entry.size:,}: it is damaged. "
                "Fetch or save the directory again"
            )
        if limit is None and path.suffix != ".safetensors":
            limit = MAX_JSON
        if limit is not None and size > limit:
            raise ValueError(f"{path} has {size:,} bytes, expected at most {limit:,}: refused")
        if not reads:
            return b""
        if path.suffix == ".safetensors" and size > MAX_TEXT:
            _check_size(file, size, where=str(path))
        return file.read(size)


def _check_size(file: BinaryIO, size: int, *, where: str) -> None:
    """Compare a file's size with what its header says, before a large file is read."""
    start = file.read(8)
    start += file.read(min(int.from_bytes(start, "little"), MAX_TEXT))
    ends = [entry["data_offsets"] for entry in read_header(start, where).values()]
    try:
        said = len(start) + max((end for _, end in ends), default=0)
    except (TypeError, ValueError):
        said = 0
    if said != size:
        raise ValueError(f"{where} is not a valid safetensors file: {size:,} bytes, its header says {said:,}")
    file.seek(0)


def _allowed_roots(root: Path) -> list[str]:
    """``root``, and if it lies in ``<repository>/snapshots/<revision>`` of a Hub cache, ``<repository>/blobs``."""
    allowed = [str(root)]
    for repository in root.parents:
        blobs = repository / "blobs"
        snapshots = repository / "snapshots"
        if snapshots in root.parents and blobs.is_dir() and os.path.realpath(blobs) == str(blobs):
            allowed.append(str(blobs))
    return allowed


def _decode(name: str, data: bytes, *, where: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    if name.endswith(".md"):
        raise ValueError(f"{where}: a text is not read as data")
    if name.endswith(".safetensors"):
        return decode_tensors(data, where=where, shapes=shapes)
    return decode_json(data, where=where) if name.endswith(".json") else data
