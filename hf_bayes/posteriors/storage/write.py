"""Saving: stage, commit, install (the protocol is told in the package's docstring)."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.formats import decode_json, encode_json, encode_tensors
from hf_bayes.posteriors.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_JSON,
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

T = TypeVar("T")


class Group(Protocol):
    """Processes that write one directory together, on storage that they share."""

    @property
    def rank(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    def share(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks; all must call it."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    num_processes = 1

    def share(self, value: Any) -> list[Any]:
        return [value]


def write_directory(
    directory: str | os.PathLike[str], files: Mapping[str, Content], *, format: str, group: Group | None = None
) -> None:
    """Replace the directory's content by ``files``, in one step for every reader; other files of the user stay.

    Of several processes each writes its own files; the first one commits them all, and all return after that.
    A text (``.md``) is not verified when read: a user may edit it. One that was edited since the last save is kept,
    with a warning.

    Args:
        directory: made if missing.
        files: relative name -> content; texts from the first process only.
        format: what the directory is, such as "hf_bayes.posterior"; a directory of another format is not overwritten.
        group: the processes; None means that there is one.
    Raises:
        ValueError: for a bad name or content, or files in the directory that would make it unreadable.
        OSError: if it cannot be written (disk full, read-only, ...), naming path and bytes; what was there is intact.
            On every process, if one fails.
    """
    root, group = Path(directory), group or Alone()
    for name in files:
        check_name(name)
    save = _Save(root, format)
    try:
        staging = _together(group, lambda: save.begin(files) if group.rank == 0 else "")[0]
        written = _together(group, lambda: _write_files(root, staging, files, kept=save.kept))
        _together(group, lambda: save.commit(staging, written) if group.rank == 0 else None)
    except BaseException:
        save.abandon()
        raise
    finally:
        save.close()
    if save.kept:
        warnings.warn(
            f"{some(save.kept)} in {root} was edited and is kept: delete it to have it written at the next save"
        )


class _Save:
    """What the first process does of a save: it holds the lock from the first step to the last."""

    def __init__(self, root: Path, format: str) -> None:
        self.root, self.format = root, format
        self.kept: list[str] = []
        self.made: list[Path] = []
        self.old: Manifest | None = None
        self._resources = contextlib.ExitStack()
        self._began = False

    def begin(self, files: Mapping[str, Content]) -> str:
        """Make a staging directory and return its name."""
        check_is_directory(self.root)
        self.made = disk.make_directories(self.root)
        self._resources.enter_context(disk.lock(self.root))
        _recover(self.root)
        self._began = True
        self.old = old = _own_manifest(self.root, self.format)
        _refuse_foreign(self.root, old, {name for name, content in files.items() if isinstance(content, bytes)})
        self.kept = [n for n, text in files.items() if isinstance(text, str) and not _is_ours(self.root, n, text, old)]
        staging = f"{STAGING}{secrets.token_hex(8)}"
        with disk.explaining(self.root, 0):
            (self.root / staging).mkdir()
        return staging

    def commit(self, staging: str, written: list[_Written]) -> None:
        """Steps 1 (its end), 2 and 3 of the protocol, once the files of all processes are there."""
        committed = False
        entries = {name: entry for part in written for name, entry in part.entries.items()}
        texts = {name: digest for part in written for name, digest in part.texts.items()}
        try:
            pending = self._seal(self.root / staging, entries, texts)
            disk.fsync(self.root)
            os.replace(pending / MANIFEST, self.root / MANIFEST)
            committed = True
            disk.fsync(self.root)  # before any rename of step 3: after a power cut the manifest must not be older
            _install(self.root, pending)
        except OSError as error:
            self.abandon()
            total = sum(entry["size"] for entry in entries.values())
            raise disk.explained(error, self.root, total, committed=committed) from error

    def _seal(self, staging: Path, entries: dict[str, Any], texts: dict[str, str]) -> Path:
        """The manifest and the directory's new name: returns the complete pending directory."""
        manifest = {"format": self.format, "format_version": FORMAT_VERSION, "files": entries, "texts": texts}
        data = encode_json(manifest, where=MANIFEST)
        disk.write(staging / MANIFEST, data)
        obsolete = sorted(set(self.old.files) - set(entries) - set(texts)) if self.old else []
        disk.write(staging / OBSOLETE, encode_json({"files": obsolete}, where=OBSOLETE))
        for parent, _, _ in os.walk(staging, topdown=False):
            disk.fsync(Path(parent))
        pending = self.root / (PENDING + hashlib.sha256(data).hexdigest())
        os.rename(staging, pending)
        return pending

    def abandon(self) -> None:
        """After a failure, on whichever side of the commit it came."""
        if self._began:
            with contextlib.suppress(OSError, ValueError):
                _recover(self.root)

    def close(self) -> None:
        self._resources.close()
        disk.remove_directories(self.made)  # those that a failed save has left empty


class _Written(NamedTuple):
    """What a process has put into the staging directory."""

    entries: dict[str, Any]
    texts: dict[str, str]


def _write_files(root: Path, staging: str, files: Mapping[str, Content], *, kept: list[str]) -> _Written:
    """Step 1: the files of this process."""
    entries, texts = {}, {}
    with disk.explaining(root, sum(_size(content) for content in files.values())):
        for name, content in files.items():
            _destination(root, name)
            data = _encode(name, content)
            if len(data) > MAX_JSON and not name.endswith(".safetensors"):
                raise ValueError(f"{name} has {len(data):,} bytes, at most {MAX_JSON:,} can be read again: not saved")
            if isinstance(content, str):
                texts[name] = hashlib.sha256(data).hexdigest()
            else:
                entries[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if name in kept:
                continue
            path = root / staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.write(path, data)
    return _Written(entries, texts)


def _together(group: Group, do: Callable[[], T]) -> list[T]:
    """Everybody's result of a step; if it fails somewhere it fails everywhere."""
    result, error = None, None
    try:
        result = do()
    except BaseException as caught:
        error = caught
        if group.num_processes == 1:
            raise
    outcomes = group.share((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise OSError(f"process {rank} could not save: {failure}")
    return [value for value, _ in outcomes]


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
    made = disk.make_directories(root.parent)
    staging = root.parent / f"{STAGING}{secrets.token_hex(8)}"
    try:
        staging.mkdir()
        for name, content in files.items():
            check_name(name)
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            disk.write(staging / name, _encode(name, content))
        os.rename(staging, root)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        total = sum(_size(content) for content in files.values())
        explained = disk.explained(error, root, total, committed=False) if isinstance(error, OSError) else error
        disk.remove_directories(made)
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
        disk.fsync(path)
    disk.remove_empty_directories(root, obsolete)
    shutil.rmtree(pending)


def recover(directory: str | os.PathLike[str]) -> None:
    """Do now what the next save would do first: complete a save that a killed process committed, drop other leftovers.

    Readers do not need it; whoever copies the files by their final names (an upload) does.
    """
    root = Path(directory)
    if any(root.glob(f"{PREFIX}*")):
        with disk.lock(root):
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


def _refuse_foreign(root: Path, manifest: Manifest | None, raw: Set[str] = frozenset()) -> None:
    """Refuse files that would make the saved directory unreadable; those under the ``raw`` names are overwritten."""
    listed = dict.fromkeys([*(manifest.files if manifest else ()), *raw])
    foreign = unlisted_files(root, listed)
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
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    return (encode_tensors if name.endswith(".safetensors") else encode_json)(content, where=name)


def _size(content: Content) -> int:
    if isinstance(content, (str, bytes)):
        return len(content)
    return sum(value.nbytes for value in content.values() if isinstance(value, Tensor))
