"""Checkpoints of a run: Trainer's own files, and beside them ``chains/`` with one file a chain, whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_bayes.storage import MANIFEST, Group, read_directory, write_directory

FORMAT = "hf_bayes.chains"
FOLDER = "chains"
SETTINGS = "settings.json"
TRAINER_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
NOT_COMPARED = ("num_updates", "num_processes")


def save(
    checkpoint: str | Path, tensors: dict[int, dict[str, Tensor]], settings: dict[str, Any], *, group: Group
) -> None:
    """Write the chains of all processes and the settings they were run with; returns when all have been written.

    Args:
        tensors: of the chains that this process writes.
        group: the processes.
    """
    files: dict[str, Any] = {_chain_file(chain): content for chain, content in tensors.items()}
    folder = Path(checkpoint) / FOLDER
    if group.rank == 0:
        files[SETTINGS] = {**settings, "num_processes": group.num_processes}
        if not (folder / MANIFEST).exists():  # what a checkpoint that lost its manifest has left is nobody's
            for leftover in folder.glob("chain_*.safetensors"):
                leftover.unlink()
    write_directory(folder, files, format=FORMAT, group=group)


def load(
    checkpoint: str | Path, settings: dict[str, Any], *, chains: range
) -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]:
    """Some chains of a checkpoint, and its settings.

    Args:
        settings: of the run that goes on; what may differ (``NOT_COMPARED``) is not compared.
        chains: those wanted.
    Raises:
        FileNotFoundError: naming the file without which a resumed run would not be the same run.
        ValueError: listing the settings that differ, as saved and as given.
    """
    missing = [name for name in TRAINER_FILES if not (Path(checkpoint) / name).is_file()]
    missing += [] if list(Path(checkpoint).glob("rng_state*.pth")) else ["rng_state.pth"]
    if missing:
        raise FileNotFoundError(
            f"checkpoint {checkpoint} lacks {', '.join(missing)}: a run resumed without would be another"
        )
    wanted = {SETTINGS, *map(_chain_file, chains)}
    files = read_directory(Path(checkpoint) / FOLDER, format=FORMAT, only=wanted.__contains__)
    saved = files.pop(SETTINGS)
    given = json.loads(json.dumps(settings))
    differing = {k for k in saved.keys() | given.keys() if k not in NOT_COMPARED and saved.get(k) != given.get(k)}
    if differing:
        lines = "; ".join(f"{key}: saved {saved.get(key)!r}, now {given.get(key)!r}" for key in sorted(differing))
        raise ValueError(f"checkpoint {checkpoint} belongs to another run: {lines}. Resume with the saved settings")
    return {int(name[6:9]): content for name, content in files.items()}, saved


def newest_complete(output_dir: str | Path) -> str | None:
    """The newest checkpoint that can be resumed; an unfinished one (a killed save) is passed over."""
    found = {
        int(match[1]): folder
        for folder in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", folder.name))
    }
    return next((str(found[step]) for step in sorted(found, reverse=True) if _is_complete(found[step])), None)


def _is_complete(checkpoint: Path) -> bool:
    """Whether every file is there in its length; Trainer writes trainer_state.json last and not in one step."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        settings = read_directory(checkpoint / FOLDER, format=FORMAT, only=SETTINGS.__eq__)[SETTINGS]
    except (OSError, ValueError):
        return False
    count = settings["num_processes"]
    states = ["rng_state.pth"] if count == 1 else [f"rng_state_{rank}.pth" for rank in range(count)]
    return all((checkpoint / name).is_file() for name in (*TRAINER_FILES, *states))


def _chain_file(chain: int) -> str:
    return f"chain_{chain:03d}.safetensors"
