"""Save a directory: stage, commit, install (the package's docstring describes the protocol)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.formats import Content, bytes_in, encode, encode_json, size_in_bytes, texts_in
from hf_bayes.posteriors.storage.group import Alone, Group, together
from hf_bayes.posteriors.storage.listing import some
from hf_bayes.posteriors.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_JSON,
    PENDING,
    STAGING,
    Manifest,
    check_is_directory,
    check_name,
)
from hf_bayes.posteriors.storage.ownership import check_new, destination, is_unedited, own_manifest, refuse_foreign
from hf_bayes.posteriors.storage.recovery import OBSOLETE, install, recover_locked


def write_directory(
    directory: str | os.PathLike[str], files: Mapping[str, Content], *, format: str, group: Group | None = None
) -> None:
    """Replace the saved content of a directory by ``files``, in one step for every reader. Other files stay.

    Each of several processes writes its own files. The first process commits them all, and every process returns after
    the commit. A text (``.md``) is not verified when it is read: a user may edit it. A text that was edited since the
    last save is kept, with a warning.

    Args:
        directory: the target; it is made if missing.
        files: relative name -> content. Only the first process may write texts.
        format: the kind of directory, such as "hf_bayes.posterior". A directory of another format is not overwritten.
        group: the processes. None means one process.
    Raises:
        ValueError: for a bad name or content, or files in the directory that would make it unreadable.
        OSError: if it cannot be written (disk full, read-only, ...), naming path and bytes. The old content is intact.
            If one process fails, every process raises.
    """
    root, group = Path(directory), group or Alone()
    for name in files:
        check_name(name)
    with _saving(root, format) as save:
        staging = together(group, lambda: save.begin(files) if group.rank == 0 else "")[0]
        written = together(group, lambda: _write_files(root, staging, files, kept=save.kept))
        together(group, lambda: save.commit(staging, written) if group.rank == 0 else None)
    if save.kept:
        warnings.warn(
            f"{some(save.kept)} in {root} was edited and is kept: delete it to have it written at the next save"
        )


def replace_text(directory: str | os.PathLike[str], name: str, text: str, *, format: str) -> None:
    """Replace one text of a saved directory, edited or not, in one step. Later saves do not count it as edited.

    Raises:
        ValueError, OSError: as ``write_directory``, and if nothing is saved in the directory.
    """
    root, files = Path(directory), {name: text}
    check_name(name)
    with _saving(root, format) as save:
        staging = save.begin(files)
        if save.old is None:
            raise FileNotFoundError(f"{root} holds no {MANIFEST} that can be read: {name} has no place in it")
        save.commit(staging, [_write_files(root, staging, files, kept=[])], unchanged=save.old)


@contextlib.contextmanager
def _saving(root: Path, format: str) -> Iterator[_Save]:
    """Yield a save, which is undone or completed if the block fails."""
    save = _Save(root, format)
    try:
        yield save
    except BaseException:
        save.abandon()
        raise
    finally:
        save.close()


class _Save:
    """The part of a save that the first process does. It holds the lock from the first step to the last."""

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
        recover_locked(self.root)
        self._began = True
        self.old = old = own_manifest(self.root, self.format)
        refuse_foreign(self.root, old, set(bytes_in(files)))
        self.kept = [name for name, text in texts_in(files).items() if not is_unedited(self.root, name, text, old)]
        staging = f"{STAGING}{secrets.token_hex(8)}"
        with disk.explaining(self.root, 0):
            (self.root / staging).mkdir()
        return staging

    def commit(self, staging: str, written: list[_Written], *, unchanged: Manifest | None = None) -> None:
        """Finish step 1 and do steps 2 and 3 of the protocol, after all processes have written their files.

        Args:
            unchanged: the manifest whose other files stay as they are; None removes them.
        """
        committed = False
        entries = {name: entry for part in written for name, entry in part.entries.items()}
        texts = {name: digest for part in written for name, digest in part.texts.items()}
        total = sum(entry["size"] for entry in entries.values())
        if unchanged is not None:
            entries = {**{name: entry._asdict() for name, entry in unchanged.files.items()}, **entries}
            texts = {**unchanged.texts, **texts}
        try:
            pending = self._seal(self.root / staging, entries, texts)
            disk.fsync(self.root)
            os.replace(pending / MANIFEST, self.root / MANIFEST)
            committed = True
            disk.fsync(self.root)  # before any rename of step 3: after a power cut the manifest must not be older
            install(self.root, pending)
        except OSError as error:
            self.abandon()
            raise disk.explained(error, self.root, total, committed=committed) from error

    def _seal(self, staging: Path, entries: dict[str, Any], texts: dict[str, str]) -> Path:
        """Write the manifest, rename the staging directory, and return the complete pending directory."""
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
        """Recover after a failure, before or after the commit."""
        if self._began:
            with contextlib.suppress(OSError, ValueError):
                recover_locked(self.root)

    def close(self) -> None:
        """Free the lock, and remove new directories that a failed save has left empty."""
        self._resources.close()
        disk.remove_directories(self.made)


class _Written(NamedTuple):
    """The files that one process has put into the staging directory.

    Attributes:
        entries: name -> size and sha256 of each verified file.
        texts: name -> sha256 of each text.
    """

    entries: dict[str, Any]
    texts: dict[str, str]


def _write_files(root: Path, staging: str, files: Mapping[str, Content], *, kept: list[str]) -> _Written:
    """Write the files of this process into the staging directory (step 1)."""
    entries, texts = {}, {}
    with disk.explaining(root, sum(size_in_bytes(content) for content in files.values())):
        for name, content in files.items():
            destination(root, name)
            data = encode(name, content)
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


def write_plain(directory: str | os.PathLike[str], files: Mapping[str, Content]) -> None:
    """Write a new directory in one step, without a manifest: for readers without hf_bayes.

    Raises:
        ValueError, OSError: as ``new_directory``.
    """
    with new_directory(directory, total=sum(map(size_in_bytes, files.values()))) as staging:
        for name, content in files.items():
            check_name(name)
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            disk.write(staging / name, encode(name, content))


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str], *, total: int | None = None) -> Iterator[Path]:
    """Yield an empty staging directory, which becomes ``directory`` in one step after the block.

    A directory that exists stays, with its mode and its hidden files, and is filled name by name. It may be the working
    directory of a shell, a volume of a container, or a fresh clone of a repository.

    Args:
        directory: the target, which is missing or empty but for hidden files.
        total: the bytes that the block writes, for the error message; None if they are not known.
    Raises:
        ValueError: as ``check_new``.
        OSError: if it cannot be written, naming ``directory``. No file is left then, as after any other error.
    """
    check_new(directory)
    root = Path(os.path.realpath(directory))  # a link to an empty directory stays
    made = disk.make_directories(root.parent)
    fixed = root.exists()
    staging = (root if fixed else root.parent) / f"{STAGING}{secrets.token_hex(8)}"
    try:
        staging.mkdir()
        yield staging
        for path in (*staging.rglob("*"), staging):
            disk.fsync(path)
        if fixed:
            _fill(root, staging)
        else:
            os.rename(staging, root)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        found = disk.failure(error, (root, staging))
        explained = None if found is None else disk.explained(found, Path(directory), total, committed=False)
        disk.remove_directories(made)
        if explained is None:
            raise
        raise explained from error


def _fill(root: Path, staging: Path) -> None:
    """Move the content of a staging directory to ``root``. If this fails, ``root`` is as before."""
    # the manifest is last: before it, no reader takes the directory for a saved one
    names = sorted(os.listdir(staging), key=lambda name: (name == MANIFEST, name))
    for name in names:
        if os.path.lexists(root / name):  # a hidden file of the user
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(root / name))
    try:
        for name in names:
            os.rename(staging / name, root / name)
        staging.rmdir()
    except BaseException:
        for name in names:
            disk.remove(root / name)
        raise
