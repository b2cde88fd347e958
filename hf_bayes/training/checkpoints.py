"""Checkpoints of a run: Trainer's own files, ``chains/`` with one file a chain, and a seal over all of them.

The seal (``SEAL``) is written last. It lists size and sha256 of every file that a resume reads, and of the manifest of
``chains/``, which lists the chains' files. A checkpoint without a seal is unfinished. A file that differs from what the
seal lists is refused by name before transformers opens it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_bayes.posteriors.storage import MANIFEST, Group, check_seal, read_directory, seal, unseal, write_directory

FORMAT = "hf_bayes.chains"
FORMAT_OF_CHECKPOINT = "hf_bayes.checkpoint"
FOLDER = "chains"
SETTINGS = "settings.json"
SEAL = "checkpoint_manifest.json"
TRAINER_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
READ_BY_TRAINER = ("rng_state*.pth", "scaler.pt", "optimizer.bin*")
"""Patterns of further files. Trainer reads them when it resumes, if they exist."""
NOISE = "learnt_noise_std"
"""The setting with the noise of a regression that a run has learnt so far; None if it learns none."""
NOT_COMPARED = ("num_updates", "num_processes", NOISE)
FOUND = "found_rate"
"""The setting with the learning rate that a run has found. If it differs, then another setting differs, too, and an
error lists only that one."""
RUN = "run_number"
"""The setting with the number of a run on its trainer, from 0. The first run has no such setting."""
WORDS = {
    "num_steps": "updates of the run (max_steps, or num_train_epochs)",
    "rows_per_update": "rows in an update (per_device_train_batch_size, gradient_accumulation_steps)",
    FOUND: "the learning rate that the run has found",
    RUN: "runs on the same trainer before this one",
    "start": "the weights where runs start (a new head or adapter is random: call set_seed before the model is made)",
}
"""Words for an error, by setting: for settings that are not arguments, with the arguments that determine them."""
MAX_DIFFERENCES = 12
"""The largest number of settings that an error lists. It only counts further ones."""


class SavedRun(NamedTuple):
    """A checkpoint after a check of all its files but the chains.

    Attributes:
        folder: the folder of the checkpoint.
        settings: the settings of the run that wrote it.
    """

    folder: str
    settings: dict[str, Any]

    @property
    def num_updates(self) -> int:
        """The number of updates before the checkpoint."""
        return int(self.settings["num_updates"])

    @property
    def run_number(self) -> int:
        """The number of the run on its trainer, from 0."""
        return int(self.settings.get(RUN, 0))

    @property
    def found_rate(self) -> float | None:
        """The learning rate that the run has found; None if it has found none."""
        return self.settings.get(FOUND)

    @property
    def noise_std(self) -> float | None:
        """The noise of a regression that the run had learnt; None if it learns none."""
        return self.settings.get(NOISE)


def begin(checkpoint: str | Path, *, group: Group) -> None:
    """Break the seal of an earlier save to the same place and remove what the new one may leave standing.

    Only the first process does this. No process writes such a file before all have written their chains (``save``).
    """
    if group.rank == 0 and Path(checkpoint).is_dir():
        unseal(checkpoint, file=SEAL)
        for leftover in _read_by_trainer(Path(checkpoint)):
            leftover.unlink()


def save(
    checkpoint: str | Path, tensors: dict[int, dict[str, Tensor]], settings: dict[str, Any], *, group: Group
) -> None:
    """Write the chains of all processes and the settings they were run with; returns when all have been written.

    Args:
        checkpoint: the folder of the checkpoint.
        tensors: {chain: its tensors by name}, for the chains that this process writes.
        settings: the settings of the run, as JSON can store them.
        group: the processes.
    """
    files: dict[str, Any] = {_chain_file(chain): content for chain, content in tensors.items()}
    folder = Path(checkpoint) / FOLDER
    if group.rank == 0:
        files[SETTINGS] = {**settings, "num_processes": group.num_processes}
        if not (folder / MANIFEST).exists():  # left by a checkpoint that lost its manifest
            for leftover in folder.glob("chain_*.safetensors"):
                leftover.unlink()
    write_directory(folder, files, format=FORMAT, group=group)


def seal_checkpoint(checkpoint: str | Path, *, group: Group) -> None:
    """Seal a checkpoint that all processes have written: it is complete from then on.

    Raises:
        OSError: naming the file that is missing, or the path that cannot be written; on every process.
    """
    seal(checkpoint, _sealed_files(group.num_processes), file=SEAL, format=FORMAT_OF_CHECKPOINT, group=group)


def load(saved: SavedRun, settings: dict[str, Any], *, chains: range) -> dict[int, dict[str, Tensor]]:
    """Return some chains of a checkpoint, by number, after a check of their files and of the settings.

    Args:
        saved: the checkpoint.
        settings: the settings of the run that resumes. Those in ``NOT_COMPARED`` may differ.
        chains: the numbers of the chains to return.
    Raises:
        FileNotFoundError, ValueError: as ``verified``; also for settings that differ, listed as saved and as given.
    """
    if words := differences(saved.settings, settings):
        raise ValueError(
            f"checkpoint {saved.folder} belongs to another run: {words}. Resume with the saved settings, or begin anew "
            "without resume_from_checkpoint"
        )
    files = _read(Path(saved.folder), [_chain_file(chain) for chain in chains])
    return {chain: files[_chain_file(chain)] for chain in chains}


def verified(checkpoint: str | Path) -> SavedRun:
    """Return a checkpoint, after a check of all its files but the chains.

    Raises:
        FileNotFoundError: naming the file without which a resumed run would not be the same run.
        ValueError: naming the file that is damaged or exchanged.
    """
    return SavedRun(str(checkpoint), _checked(Path(checkpoint))[0])


def _checked(checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a checkpoint and the names of the files that its seal lists; see ``verified``."""
    missing = [name for name in TRAINER_FILES if not (checkpoint / name).is_file()]
    missing += [] if list(checkpoint.glob("rng_state*.pth")) else ["rng_state.pth"]
    if missing:
        raise FileNotFoundError(
            f"checkpoint {checkpoint} lacks {', '.join(missing)}: a run resumed without would be another"
        )
    listed = _check_files(checkpoint)
    return _read(checkpoint, [SETTINGS])[SETTINGS], listed


def required_newest(output_dir: str | Path) -> SavedRun:
    """Return the newest checkpoint that can be resumed.

    Raises:
        ValueError: if there is none.
    """
    found = _newest(output_dir)
    if found is None:
        raise ValueError(f"no complete checkpoint in {output_dir}: there is nothing to resume from")
    return found


def newest_complete(output_dir: str | Path) -> str | None:
    """Return the newest checkpoint that can be resumed; an unfinished one (a killed save) is passed over."""
    found = _newest(output_dir)
    return None if found is None else found.folder


def _newest(output_dir: str | Path) -> SavedRun | None:
    folders = {
        int(match[1]): folder
        for folder in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", folder.name))
    }
    complete = (_complete(folders[step]) for step in sorted(folders, reverse=True))
    return next((found for found in complete if found is not None), None)


def _complete(checkpoint: Path) -> SavedRun | None:
    """Return a checkpoint that is sealed, and whose files are as the seal and the manifest say; None for another."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        settings, listed = _checked(checkpoint)
    except (OSError, ValueError):
        return None
    complete = set(_sealed_files(settings["num_processes"])) == set(listed)
    return SavedRun(str(checkpoint), settings) if complete else None


def _check_files(checkpoint: Path) -> list[str]:
    """Return the names of the files that the seal lists, after a check of each.

    Raises:
        FileNotFoundError: naming the seal, or a listed file, if it is missing.
        ValueError: naming a file that differs from the seal, or that Trainer would read although it is not listed.
    """
    listed = check_seal(checkpoint, file=SEAL, format=FORMAT_OF_CHECKPOINT)
    needed = [name for name in (*TRAINER_FILES, f"{FOLDER}/{MANIFEST}") if name not in listed]
    unlisted = [path.name for path in _read_by_trainer(checkpoint) if path.name not in listed]
    if needed or unlisted:
        raise ValueError(
            f"{checkpoint / SEAL} does not list {', '.join(needed + unlisted)}, which a resume would read: take a "
            "checkpoint that is as it was saved"
        )
    return list(listed)


def _read(checkpoint: Path, names: list[str]) -> dict[str, Any]:
    """Return the content of files of ``chains/``, by name, after a check of each.

    Raises:
        OSError, ValueError: as ``read_directory``; also for a file that the manifest does not list, naming it.
    """
    files = read_directory(checkpoint / FOLDER, format=FORMAT, only=set(names).__contains__)
    if missing := [name for name in names if name not in files]:
        raise ValueError(
            f"{checkpoint / FOLDER / MANIFEST} does not list {', '.join(missing)}: take a checkpoint that is as it was "
            "saved"
        )
    return files


def _sealed_files(num_processes: int) -> list[str]:
    states = ["rng_state.pth"] if num_processes == 1 else [f"rng_state_{rank}.pth" for rank in range(num_processes)]
    return [*TRAINER_FILES, *states, f"{FOLDER}/{MANIFEST}"]


def _read_by_trainer(checkpoint: Path) -> list[Path]:
    return sorted(path for pattern in READ_BY_TRAINER for path in checkpoint.glob(pattern))


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the settings that must not differ and do, as saved and as given; empty if there are none.

    The settings of the run come before the settings of its base.

    Args:
        saved: the settings of a checkpoint, as JSON gives them back.
        given: the settings of the run that resumes.
    """
    given = json.loads(json.dumps(given))
    found = _differing(saved, given) - set(NOT_COMPARED)
    if found != {FOUND}:
        found -= {FOUND}
    names = sorted(found, key=lambda n: ("." in n, n))
    lines = [line for name in names for line in _lines(name, saved.get(name), given.get(name))]
    more = f"; and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    return "; ".join(lines[:MAX_DIFFERENCES]) + more


def _lines(name: str, saved: Any, given: Any) -> list[str]:
    """Return a line for a setting that differs; of a method, one for each field, and its name if that differs."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping) and saved.get("name") == given.get("name"):
        fields = sorted(_differing(saved, given))
        return [f"{name}.{field}: saved {saved.get(field)!r:.300}, now {given.get(field)!r:.300}" for field in fields]
    before, now = (value.get("name", value) if isinstance(value, Mapping) else value for value in (saved, given))
    return [f"{WORDS.get(name, name)}: saved {before!r:.300}, now {now!r:.300}"]


def _differing(saved: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    return {name for name in saved.keys() | given.keys() if saved.get(name) != given.get(name)}


def _chain_file(chain: int) -> str:
    return f"chain_{chain:03d}.safetensors"
