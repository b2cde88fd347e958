"""Saving: stage, commit, install (the protocol is told in the package's docstring)."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from torch import Tensor

from hf_bayes.storage.formats import decode_json, encode_json, encode_tensors
from hf_bayes.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    PENDING,
    POSTERIOR,
    PREFIX,
    STAGING,
    Content,
    Manifest,
    check_is_directory,
    check_name,
    parse_manifest,
    some,
    unlisted_files,
)

# In a pending directory: the files that step 3 removes. No file of a save can have this name.
OBSOLETE = f"{PREFIX}obsolete.json"
_LOCK_SECONDS = 60


def write_directory(directory: str | os.PathLike[str], files: Mapping[str, Content], *, format: str) -> None:
    """Replace the directory's content by ``files``, in one step for every reader; other files of the user stay.

    A text (``.md``) is not verified when read: a user may edit it. One that was edited since the last save is kept,
    with a warning.

    Args:
        directory: made if missing.
        files: relative name -> content.
        format: what the directory is, such as "hf_bayes.posterior"; a directory of another format is not overwritten.
    Raises:
        ValueError: for a bad name or content, or files in the directory that would make it unreadable.
        OSError: if it cannot be written (disk full, read-only, ...), naming path and bytes; what was there is intact.
    """
    root = Path(directory)
    for name in files:
        check_name(name)
    check_is_directory(root)
    made = _make_directories(root)
    try:
        with _lock(root):
            _recover(root)
            old = _own_manifest(root, format)
            _refuse_foreign(root, old)
            kept = [
                name for name, text in files.items() if isinstance(text, str) and not _is_ours(root, name, text, old)
            ]
            _commit(root, files, format=format, old=old, kept=kept)
    except BaseException:
        _remove(made)
        raise
    if kept:
        warnings.warn(f"{some(kept)} in {root} was edited and is kept: delete it to have it written at the next save")


def write_plain(directory: str | os.PathLike[str], files: Mapping[str, Content]) -> None:
    """Write a new directory in one step, without a manifest: for readers that know nothing of ours.

    Raises:
        ValueError: if the directory exists and is not empty.
        OSError: if it cannot be written; nothing is left then.
    """
    root = Path(directory)
    check_is_directory(root)
    if root.exists() and os.listdir(root):
        raise ValueError(f"{root} is not empty (holds {some(sorted(os.listdir(root)))}): choose a new directory")
    made = _make_directories(root.parent)
    staging = root.parent / f"{STAGING}{secrets.token_hex(8)}"
    try:
        staging.mkdir()
        for name, content in files.items():
            check_name(name)
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            _write(staging / name, _encode(name, content))
        os.rename(staging, root)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        total = sum(_size(content) for content in files.values())
        explained = _explain(error, root, total, committed=False) if isinstance(error, OSError) else error
        _remove(made)
        raise explained from error


def check_writable(directory: str | os.PathLike[str], overwrite: bool = True, *, format: str = POSTERIOR) -> None:
    """Refuse now what a save would refuse after hours of training. Changes nothing.

    Args:
        directory: where a later save goes; may be missing.
        overwrite: False refuses a directory that holds anything but ``checkpoint-*``, ``runs`` and hidden files.
        format: of what will be saved.
    Raises:
        OSError: if the directory is a file or cannot be written to.
        ValueError: if it holds what must not be overwritten.
    """
    root = Path(directory)
    check_is_directory(root)
    base = root
    while not base.exists():
        base = base.parent
    try:
        probe = tempfile.mkdtemp(prefix=f"{PREFIX}probe-", dir=base)
        with contextlib.suppress(FileNotFoundError):  # a save that runs meanwhile drops it
            os.rmdir(probe)
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot write to {root} ({error.strerror} in {base}): choose another directory", str(root)
        ) from error
    if not root.exists():
        return
    manifest = _own_manifest(root, format)
    if not overwrite:
        passing = ("checkpoint-*", "runs", ".*", f"{PREFIX}*")
        found = [name for name in sorted(os.listdir(root)) if not any(fnmatch.fnmatch(name, p) for p in passing)]
        if found:
            raise ValueError(
                f"{root} is not empty (holds {some(found)}): pass overwrite=True, or choose another directory"
            )
    if manifest is None or not (root / (PENDING + manifest.digest)).exists():
        _refuse_foreign(root, manifest)


def _commit(root: Path, files: Mapping[str, Content], *, format: str, old: Manifest | None, kept: list[str]) -> None:
    total = sum(_size(content) for content in files.values())
    committed = False
    try:
        for name in files:
            _destination(root, name)
        pending = _stage(root, files, format=format, old=old, kept=kept)
        _fsync(root)
        os.replace(pending / MANIFEST, root / MANIFEST)
        committed = True
        _fsync(root)  # before any rename of step 3: after a power cut the manifest must not be older than the files
        _install(root, pending)
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            _recover(root)  # an interrupt may arrive on either side of the commit
        if isinstance(error, OSError):
            raise _explain(error, root, total, committed=committed) from error
        raise


def _stage(root: Path, files: Mapping[str, Content], *, format: str, old: Manifest | None, kept: list[str]) -> Path:
    """Step 1. Returns the complete pending directory."""
    staging = root / f"{STAGING}{secrets.token_hex(8)}"
    staging.mkdir()
    entries, texts = {}, {}
    for name, content in files.items():
        data = _encode(name, content)
        path = staging / name
        if isinstance(content, str):
            texts[name] = hashlib.sha256(data).hexdigest()
        else:
            entries[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if name in kept:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, data)
    manifest = {"format": format, "format_version": FORMAT_VERSION, "files": entries, "texts": texts}
    data = encode_json(manifest, where=MANIFEST)
    _write(staging / MANIFEST, data)
    obsolete = sorted(set(old.files) - set(files)) if old else []
    _write(staging / OBSOLETE, encode_json({"files": obsolete}, where=OBSOLETE))
    for parent, _, _ in os.walk(staging, topdown=False):
        _fsync(Path(parent))
    pending = root / (PENDING + hashlib.sha256(data).hexdigest())
    os.rename(staging, pending)
    return pending


def _install(root: Path, pending: Path) -> None:
    """Step 3; may be repeated from any point of itself."""
    touched = {root}
    obsolete = []
    for parent, _, names in os.walk(pending):
        for name in names:
            relative = (Path(parent) / name).relative_to(pending).as_posix()
            if relative == OBSOLETE:
                obsolete = list(
                    decode_json((pending / OBSOLETE).read_bytes(), where=str(pending / OBSOLETE)).get("files", ())
                )
            elif relative != MANIFEST:  # an uncommitted save of the very same content had one of its own
                destination = _destination(root, relative)
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(pending / relative, destination)
                touched.add(destination.parent)
    for name in obsolete:
        _destination(root, name).unlink(missing_ok=True)
    for path in touched:
        _fsync(path)
    _remove_empty_directories(root, obsolete)
    shutil.rmtree(pending)


def recover(directory: str | os.PathLike[str]) -> None:
    """Do now what the next save would do first: complete a save that a killed process committed, drop other leftovers.

    Readers do not need it; whoever copies the files by their final names (an upload) does.
    """
    root = Path(directory)
    if any(root.glob(f"{PREFIX}*")):
        with _lock(root):
            _recover(root)


def _recover(root: Path) -> None:
    """Complete a save that was committed; drop those that were not."""
    # Any failure here goes to the caller before something is dropped: the committed content may lie in pending alone.
    try:
        data = (root / MANIFEST).read_bytes()
    except FileNotFoundError:
        data = b""
    pending = root / (PENDING + hashlib.sha256(data).hexdigest())
    if pending.is_dir() and not pending.is_symlink():
        _install(root, pending)
    for leftover in root.glob(f"{PREFIX}*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def _own_manifest(root: Path, format: str) -> Manifest | None:
    """The manifest there, or None. A damaged one is None: then none of the files counts as ours."""
    try:
        manifest = parse_manifest((root / MANIFEST).read_bytes(), root)
    except (OSError, ValueError):
        return None
    if manifest.format != format:
        raise ValueError(f"{root} holds a {manifest.format}, not a {format}: choose another directory")
    return manifest


def _refuse_foreign(root: Path, manifest: Manifest | None) -> None:
    foreign = unlisted_files(root, manifest.files if manifest else {})
    if foreign:
        raise ValueError(
            f"{root} holds {some(foreign)}, which no manifest of ours lists: with it a saved directory would be "
            "unreadable, and it is not ours to overwrite. Move it away, or choose another directory"
        )


def _is_ours(root: Path, name: str, text: str, old: Manifest | None) -> bool:
    """Whether a text may be overwritten: it is missing, or as the last save wrote it."""
    path = root / name
    if not path.is_file():
        return True
    present = path.read_bytes()
    recorded = old.texts.get(name) if old else None
    return present == text.encode() or recorded == hashlib.sha256(present).hexdigest()


def _destination(root: Path, name: str) -> Path:
    """The final path of a file. Its parents must be real directories: a link would lead out, or to another disk."""
    check_name(name)
    path = root / name
    linked = next((parent for parent in path.relative_to(root).parents if (root / parent).is_symlink()), None)
    if linked is not None and linked != Path("."):
        raise ValueError(f"{root / linked} is a link, expected a directory: replace it by a directory")
    if path.is_dir() and not path.is_symlink():
        raise ValueError(f"{path} is a directory where a file goes: move it away")
    return path


def _encode(name: str, content: Content) -> bytes:
    if isinstance(content, str):
        return content.encode()
    return (encode_tensors if name.endswith(".safetensors") else encode_json)(content, where=name)


def _size(content: Content) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(value.nbytes for value in content.values() if isinstance(value, Tensor))


def _write(path: Path, data: bytes) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        error.filename = str(path)
        raise


def _explain(error: OSError, root: Path, total: int, *, committed: bool) -> OSError:
    free = shutil.disk_usage(root if root.exists() else root.parent).free
    state = "the new save is complete, but was not tidied up" if committed else "what was there before is intact"
    return type(error)(
        error.errno,
        f"cannot save to {root}: {error.strerror} at {error.filename or root}. The save needs about {total:,} bytes, "
        f"{free:,} are free there; {state}. Free space or choose another directory, then save again",
        str(root),
    )


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_directories(path: Path) -> list[Path]:
    """Like ``mkdir -p``; returns what it made, outermost first."""
    made = []
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            directory.mkdir(exist_ok=True)
            made.append(directory)
    return made


def _remove(directories: list[Path]) -> None:
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _remove_empty_directories(root: Path, names: list[str]) -> None:
    parents = {parent for name in names for parent in PurePosixPath(name).parents if parent.name}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            (root / parent).rmdir()


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """One writer at a time; the kernel frees the lock of a killed one. Readers need none."""
    import fcntl  # POSIX only: reading must work without

    handle = os.open(root, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been saving to {root} for {_LOCK_SECONDS} s") from None
                time.sleep(0.05)
            except OSError:
                break  # network file systems without locks on directories: one writer is then up to the caller
        yield
    finally:
        os.close(handle)
