"""The files that a command writes at its end: they are checked before its work, and written in one step."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_bayes.posteriors.storage import disk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIXED = (errno.EACCES, errno.EPERM, errno.EBUSY)
"""The errors of a folder that takes no new file, and of a mounted file. The file itself may be writable."""


def check_file(path: str, *, flag: str, formats: tuple[str, ...] = ()) -> None:
    """Refuse now a file that could not be written later.

    Args:
        path: the file; it may be missing.
        flag: its flag, for the error.
        formats: the endings that its name may have; none allows any.
    Raises:
        ValueError: if it is a folder, lies in a folder that does not exist, or has another ending.
    """
    file = Path(path)
    if not path or file.is_dir():
        raise ValueError(
            f"{flag} must be a file, got {'an empty name' if not path else f'the folder {path}'}: name one"
        )
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{flag}={path}: there is no folder {file.parent}: make it, or name another file")
    if formats and file.suffix not in formats:
        raise ValueError(f"{flag} must end in {', '.join(formats)}, got {path}")


def write_file(file: Path, content: str | bytes, *, flag: str | None = None) -> None:
    """Replace a file in one step, which keeps its mode. A failure leaves the old one.

    A device or a pipe is written directly. So is a file that cannot be replaced: one with several hard links, or one in
    a folder that cannot be written to.

    Args:
        file: the file, in a folder that exists.
        content: its new content.
        flag: the flag that names the file or its folder, for the error; None if there is no other place for it.
    Raises:
        OSError: if it cannot be written, naming the file and the flag.
    """
    data = content.encode() if isinstance(content, str) else content
    # tested on the file itself: the real path of /dev/stdout is no file if it is the pipe of a shell
    direct = file.exists() and (not file.is_file() or file.stat().st_nlink > 1)
    try:
        if not direct:
            direct = not _is_replaced(Path(os.path.realpath(file)), data)  # a link stays
        if direct:
            file.write_bytes(data)
    except OSError as error:
        state = "it may be incomplete" if direct else "what was there before is intact"
        advice = ["free space"] if disk.is_full(error) else []
        advice += [] if flag is None else [f"name another place with {flag}"]
        raise type(error)(
            error.errno,
            f"cannot write {file} ({error.strerror}); {state}: {', or '.join(advice) or 'make it writable'}",
            str(file),
        ) from error


def _is_replaced(target: Path, data: bytes) -> bool:
    """Replace a file and return True; return False if only its content can be written."""
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        disk.write(part, data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except OSError as error:
        if error.errno in _FIXED and os.access(target, os.W_OK):
            return False
        raise
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return True


def write_figure(file: Path, figure: Figure, *, flag: str, dpi: int) -> None:
    """Replace the file of a figure, whose ending is its format, as ``write_file`` does."""
    data = io.BytesIO()
    figure.savefig(data, format=file.suffix[1:], dpi=dpi)
    write_file(file, data.getvalue(), flag=flag)
