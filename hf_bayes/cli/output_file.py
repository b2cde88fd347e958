"""The files that a command writes at its end: they are checked before its work, and written in one step."""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from hf_bayes.posteriors.storage import disk

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Replace a file in one step. A failure leaves the old one.

    Args:
        file: the file, in a folder that exists.
        content: its new content.
        flag: the flag that names the file or its folder, for the error; None if there is no other place for it.
    Raises:
        OSError: if it cannot be written, naming the file and the flag.
    """
    advice = "free space" if flag is None else f"free space, or name another place with {flag}"
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(file))  # a link stays
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe, such as /dev/stdout, cannot be replaced
            target.write_bytes(data)
            return
        try:
            disk.write(part, data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"cannot write {file} ({error.strerror}); what was there before is intact: {advice}",
            str(file),
        ) from error


def write_figure(file: Path, figure: Figure, *, flag: str, dpi: int) -> None:
    """Replace the file of a figure, whose ending is its format, as ``write_file`` does."""
    data = io.BytesIO()
    figure.savefig(data, format=file.suffix[1:], dpi=dpi)
    write_file(file, data.getvalue(), flag=flag)
