"""A check of a file that a command will write at its end."""

from __future__ import annotations

from pathlib import Path


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
