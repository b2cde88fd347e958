"""Complete a committed save, and remove an unfinished one (step 3 of the protocol in the package's docstring)."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.storage.formats import decode_json
from hf_bayes.posteriors.storage.manifest import MANIFEST, PENDING, PREFIX, check_name
from hf_bayes.posteriors.storage.ownership import destination

OBSOLETE = f"{PREFIX}obsolete.json"
"""The file of a pending directory that lists the files to remove in step 3. No file of a save can have this name."""


def recover(directory: str | os.PathLike[str]) -> None:
    """Do now what the next save would do first: complete a save that a killed process committed, drop other leftovers.

    Readers do not need this. Programs that copy files by their final names do, such as an upload.
    """
    root = Path(directory)
    if any(root.glob(f"{PREFIX}*")):
        with disk.lock(root):
            recover_locked(root)


def recover_locked(root: Path) -> None:
    """Recover a directory whose lock the caller holds."""
    # Any failure here is raised before something is removed: only the pending directory may hold the committed content.
    try:
        data = (root / MANIFEST).read_bytes()
    except FileNotFoundError:
        data = b""
    pending = root / (PENDING + hashlib.sha256(data).hexdigest())
    if pending.is_dir() and not pending.is_symlink():
        install(root, pending)
    for leftover in root.glob(f"{PREFIX}*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def install(root: Path, pending: Path) -> None:
    """Move the pending files to their final names (step 3). An interrupted installation may be repeated."""
    touched = {root}
    obsolete = []
    for parent, _, names in os.walk(pending):
        for name in names:
            relative = (Path(parent) / name).relative_to(pending).as_posix()
            if relative == OBSOLETE:
                obsolete = list(
                    decode_json((pending / OBSOLETE).read_bytes(), where=str(pending / OBSOLETE)).get("files", ())
                )
            elif relative != MANIFEST:  # left where an uncommitted save had the very same content
                check_name(relative)
                target = destination(root, relative)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(pending / relative, target)
                touched.add(target.parent)
    for name in obsolete:
        check_name(name)
        destination(root, name).unlink(missing_ok=True)
    for path in touched:
        disk.fsync(path)
    disk.remove_empty_directories(root, obsolete)
    shutil.rmtree(pending)
