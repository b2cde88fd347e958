"""The files of a directory that a save may replace: files of earlier saves, and texts that no user has edited."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import tempfile
from collections.abc import Set
from pathlib import Path

from hf_bayes.posteriors.storage.listing import some
from hf_bayes.posteriors.storage.manifest import (
    MANIFEST,
    PENDING,
    POSTERIOR,
    PREFIX,
    Manifest,
    check_is_directory,
    own_folders,
    parse_manifest,
    unlisted_files,
)

_PASSING = ("checkpoint-*", "runs", ".*", f"{PREFIX}*")
"""Files that may lie in a directory that counts as empty."""


def check_writable(directory: str | os.PathLike[str], overwrite: bool = True, *, format: str = POSTERIOR) -> None:
    """Refuse now what a save would refuse after hours of training. Nothing is changed.

    Args:
        directory: the target of a later save; it may be missing.
        overwrite: False refuses a directory that holds anything but ``checkpoint-*``, ``runs`` and hidden files.
        format: the format of the later save.
    Raises:
        OSError: if the directory is a file or cannot be written to.
        ValueError: if it holds files that must not be overwritten.
    """
    root = Path(directory)
    check_folder(root)
    if not root.exists():
        return
    manifest = own_manifest(root, format)
    if not overwrite:
        found = [name for name in sorted(os.listdir(root)) if not any(fnmatch.fnmatch(name, p) for p in _PASSING)]
        if found:
            raise ValueError(
                f"{root} is not empty (holds {some(found)}): pass overwrite=True, or choose another directory"
            )
    if manifest is None or not (root / (PENDING + manifest.digest)).exists():
        refuse_foreign(root, manifest)


def check_folder(directory: str | os.PathLike[str]) -> None:
    """Check that files can be written to a directory, which may be missing. Nothing is changed.

    An empty directory is made and removed in it, or in its nearest parent that exists.

    Raises:
        OSError: if the directory is a file or cannot be written to.
        ValueError: if it lies in a saved directory, which would be unreadable with other files there.
    """
    root = base = Path(directory)
    check_is_directory(root)
    _refuse_within_saved(root)
    while not base.exists():
        base = base.parent
    try:
        probe = tempfile.mkdtemp(prefix=f"{PREFIX}probe-", dir=base)
        with contextlib.suppress(FileNotFoundError):  # a save at the same time removes it
            os.rmdir(probe)
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot write to {root} ({error.strerror} in {base}): choose another directory", str(root)
        ) from error


def check_new(directory: str | os.PathLike[str]) -> None:
    """Check that a directory is new or empty but for hidden files, such as ``.git``. Nothing is changed.

    Raises:
        OSError: if it is a file.
        ValueError: if it holds visible files, or lies in a saved directory, which would be unreadable with other files.
    """
    root = Path(directory)
    check_is_directory(root)
    if root.exists() and (found := sorted(name for name in os.listdir(root) if not name.startswith("."))):
        raise ValueError(f"{root} is not empty (holds {some(found)}): choose a new directory")
    _refuse_within_saved(root)


def replaces(directory: str | os.PathLike[str], source: str | os.PathLike[str]) -> bool:
    """Return whether a save to ``directory`` would replace files of ``source``, a directory that it is made of."""
    root, read = Path(os.path.realpath(directory)), Path(os.path.realpath(source))
    manifest = _manifest(root)
    saved = [] if manifest is None else [*manifest.files, *manifest.texts]
    return root == read or (root in read.parents and any((root / name).is_relative_to(read) for name in saved))


def _refuse_within_saved(directory: Path) -> None:
    """Refuse a directory in a folder of a saved one, such as ``members``, whose files are all of the saved one."""
    root = Path(os.path.realpath(directory))
    for parent in root.parents:
        manifest = _manifest(parent)
        if manifest is not None and root.relative_to(parent).parts[0] in own_folders(manifest.files):
            raise ValueError(
                f"{directory} lies in a {manifest.format}, {parent}, which would be unreadable with other files "
                "there: choose another directory"
            )


def _manifest(root: Path) -> Manifest | None:
    """Return the manifest in ``root``; None if there is none or it is damaged."""
    try:
        return parse_manifest((root / MANIFEST).read_bytes(), root)
    except (OSError, ValueError):
        return None


def own_manifest(root: Path, format: str) -> Manifest | None:
    """Return the manifest in ``root``. None if there is none or it is damaged: then no file counts as saved by us.

    Raises:
        ValueError: if the directory has another format.
    """
    manifest = _manifest(root)
    if manifest is not None and manifest.format != format:
        raise ValueError(f"{root} holds a {manifest.format}, not a {format}: choose another directory")
    return manifest


def refuse_foreign(root: Path, manifest: Manifest | None, raw: Set[str] = frozenset()) -> None:
    """Refuse files that would make the saved directory unreadable. Files with ``raw`` names may be overwritten."""
    listed = dict.fromkeys([*(manifest.files if manifest else ()), *raw])
    foreign = unlisted_files(root, listed)
    if foreign:
        raise ValueError(
            f"{root} holds {some(foreign)}, which no manifest of hf_bayes lists: a posterior saved beside it would be "
            "unreadable, and hf_bayes does not overwrite it. Move it away, or choose another directory"
        )


def is_unedited(root: Path, name: str, text: str, old: Manifest | None) -> bool:
    """Return whether a text may be overwritten: it is missing, or no user has edited it since the last save."""
    path = root / name
    if not path.is_file():
        return True
    present = path.read_bytes()
    recorded = old.texts.get(name) if old else None
    return present == text.encode() or recorded == hashlib.sha256(present).hexdigest()


def destination(root: Path, name: str) -> Path:
    """Return the final path of a file whose name is checked (``check_name``).

    Raises:
        ValueError: if the path is a directory, or a parent is a link: it would lead outside or to another disk.
    """
    path = root / name
    linked = next((parent for parent in path.relative_to(root).parents if (root / parent).is_symlink()), None)
    if linked is not None and linked != Path("."):
        raise ValueError(f"{root / linked} is a link, expected a directory: replace it by a directory")
    if path.is_dir() and not path.is_symlink():
        raise ValueError(f"{path} is a directory, expected a file: move it away")
    return path
