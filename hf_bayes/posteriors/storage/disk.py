"""Disk operations of a save: durable files and directories, a lock for one writer, and errors that explain."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

LOCK_SECONDS = 60


def write(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk. An error names the file."""
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


@contextlib.contextmanager
def explaining(root: Path, total: int) -> Iterator[None]:
    """Explain the disk errors of a block: a save of ``total`` bytes to ``root`` that is not committed yet."""
    try:
        yield
    except OSError as error:
        raise explained(error, root, total, committed=False) from error


def failure(error: BaseException, written: Sequence[Path]) -> OSError | None:
    """Return the failure to write that an error reports; None for another error.

    The libraries safetensors and tokenizers raise errors of their own, which name the number of the system's error.

    Args:
        error: the error of a block that writes to ``written``.
        written: directories. An error that names a file elsewhere is about a file that is read.
    """
    if isinstance(error, OSError):
        first = error.__cause__ if isinstance(error.__cause__, OSError) else error  # an explained one has a cause
        file = None if first.filename is None else Path(os.path.abspath(os.fsdecode(first.filename)))
        elsewhere = file is not None and not any(file.is_relative_to(directory) for directory in written)
        return None if first.errno is None or elsewhere else first
    number = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def explained(error: OSError, root: Path, total: int | None, *, committed: bool) -> OSError:
    """Return the same error with the size of the save, the free space, and the state of ``root`` in its message.

    Args:
        error: the error of the disk.
        root: the target of the save.
        total: the bytes of the save; None if they are not known.
        committed: whether the new content is in place.
    """
    free = shutil.disk_usage(root if root.exists() else root.parent).free
    state = "the new save is complete, but was not tidied up" if committed else "what was there before is intact"
    space = f"{free:,} bytes are" if total is None else f"The save needs about {total:,} bytes, {free:,} are"
    advice = "Free space or choose" if is_full(error) else "Choose"
    return type(error)(
        error.errno,
        f"cannot save to {root}: {error.strerror} at {error.filename or root}. {space} free there; {state}. {advice} "
        "another directory, then save again",
        str(root),
    )


def is_full(error: OSError) -> bool:
    """Return whether an error reports a full disk or an exhausted quota, so that free space helps."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def fsync(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directories(path: Path) -> list[Path]:
    """Make a directory and its parents. Return the new directories, outermost first."""
    made = []
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            directory.mkdir(exist_ok=True)
            made.append(directory)
    return made


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_directories(directories: list[Path]) -> None:
    """Remove the empty ones of these directories, the last first."""
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            directory.rmdir()


def remove_empty_directories(root: Path, names: list[str]) -> None:
    """Remove the directories that held the files ``names`` and are empty now."""
    parents = {parent for name in names for parent in PurePosixPath(name).parents if parent.name}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            (root / parent).rmdir()


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Lock a directory for one writer. The kernel frees the lock of a killed process. Readers need no lock."""
    import fcntl  # POSIX only: reading must work without it

    handle = os.open(root, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been saving to {root} for {LOCK_SECONDS} s") from None
                time.sleep(0.05)
            except OSError:
                break  # a network file system without locks on directories: the caller must then keep to one writer
        yield
    finally:
        os.close(handle)
