"""Posteriors on the Hugging Face Hub: download a repository, upload a saved directory."""

from __future__ import annotations

import fnmatch
import glob
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeGuard, Unpack, cast

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_bayes.core.text_safety import visible_line
from hf_bayes.posteriors import sidecars, storage
from hf_bayes.posteriors.benchmark_results import FOLDER as BENCHMARKS
from hf_bayes.posteriors.card_results import EVALUATION, PICTURE, read_beside
from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.directory import GAUSSIAN, TRACE, fingerprint_of
from hf_bayes.posteriors.file_formats import ADAPTER, ADAPTER_CONFIG, CHECKPOINT_FOLDERS
from hf_bayes.posteriors.student import STUDENT

CARD = "README.md"
FILES = ("*.json", "*.safetensors", "*.md", *sidecars.NAMES)
"""Patterns of the files of a posterior."""
_BESIDE = (PICTURE, EVALUATION, f"{BENCHMARKS}/*.yaml")
"""Patterns of the files that an upload takes from beside the model card."""
_REPLACED = ("members/*", ADAPTER_CONFIG, ADAPTER, GAUSSIAN, TRACE, STUDENT, *_BESIDE)
"""An upload deletes the files of an earlier push that match these, or are sidecars, and are not uploaded again. A
member left there would make the posterior unreadable. A chat template left there would be used with the new
posterior, and figures left there would be shown beside it."""


class Download(TypedDict, total=False):
    """The settings of a download, as in transformers. They hold for a posterior and for its base model."""

    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    force_download: bool
    local_files_only: bool


class Location(Download, total=False):
    """The place of a posterior in its directory or repository, and the settings of the download.

    Attributes:
        revision: branch, tag or commit of the repository.
        subfolder: the folder of the posterior in the directory or repository.
    """

    revision: str | None
    subfolder: str | None


LOCATION = tuple(Location.__annotations__)


def download_of(location: Location) -> Download:
    """Return the settings of the download alone, which loading the base model takes, too."""
    return cast(Download, {name: value for name, value in location.items() if name in Download.__annotations__})


def fetch(source: str | os.PathLike[str], *, patterns: Sequence[str], **location: Unpack[Location]) -> Path:
    """Return a local directory: ``source`` itself, or the downloaded repository of that id.

    Args:
        source: a directory or a repository id.
        patterns: the files to download. A directory is used unchanged.
        location: the place of the posterior and the settings of the download.
    Raises:
        TypeError: for an unknown setting.
        OSError: if there is neither a directory nor a repository.
        ValueError: if ``source`` is no text or path, ``subfolder`` leads out of the directory, or a directory has a
            revision.
    """
    if not is_place(source):
        advice = ": give its .posterior" if hasattr(type(source), "posterior") else ""  # a trainer without a run raises
        raise ValueError(f"expected a directory or a repository id, got {type(source).__name__}{advice}")
    if unknown := [name for name in location if name not in LOCATION]:
        raise TypeError(f"a posterior's place has no {', '.join(unknown)}: it takes {', '.join(LOCATION)}")
    subfolder, revision, download = location.get("subfolder"), location.get("revision"), download_of(location)
    parts = Path(subfolder or "").parts
    if os.path.isabs(subfolder or "") or ".." in parts:
        raise ValueError(f"subfolder must be a relative path inside {source}, got {subfolder!r}")
    path = Path(source)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{source} is a file: give the directory of the posterior")
    if path.exists() and revision not in (None, "main"):  # "main" is the default of other libraries
        raise ValueError(
            f"revision={revision!r} is for a repository of the Hub, and {source} is a folder here: leave it out, or "
            "give the id of the repository"
        )
    if not path.exists():
        path = _download(str(source), patterns=patterns, folder="/".join(parts), revision=revision, **download)
    path = path.joinpath(*parts)
    if not path.is_dir():
        raise FileNotFoundError(f"{source} has no folder {subfolder!r}")
    return path


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> CommitInfo:
    """Upload a saved posterior: the files of its manifest (tokenizer and processor among them), and its model card.

    The card's picture, evaluation and results on benchmarks go with it. No other file in the directory is uploaded: no
    checkpoints, optimizers or ``training_args.bin``, which is a pickle and may hold a token.

    Returns:
        The commit, a text with its address.
    Raises:
        ValueError, OSError: if the posterior is damaged, a text in it looks like an access token, or the picture, the
            evaluation or a result is of another posterior.
    """
    options: dict[str, Any] = {"private": private, "revision": revision, "commit_message": commit_message}
    return upload(directory, repo_id, token=token, **options)


def upload(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    with_repository: Callable[[str], None] | None = None,
    token: str | bool | None,
    private: bool | None,
    revision: str | None,
    commit_message: str | None,
) -> CommitInfo:
    """Upload a saved posterior as ``push_directory`` does.

    Args:
        with_repository: a function that takes the id of the repository with its owner, and may write the card anew. It
            is called after all checks, when the repository has been made. None leaves the card as it is.
    """
    root = Path(directory)
    storage.recover(root)
    contents = storage.read_directory(root, format=storage.POSTERIOR, raw=sidecars.is_sidecar)
    found = [file for pattern in (CARD, *_BESIDE) for file in sorted(root.glob(pattern))]
    beside = [file.relative_to(root).as_posix() for file in found]
    _check_beside(root, beside, contents)
    names = [*contents, storage.MANIFEST, *beside]
    for name in names:
        if not name.endswith(".safetensors") and sidecars.ACCESS_TOKEN.search((root / name).read_bytes()):
            raise ValueError(
                f"{root / name} holds what looks like an access token of the Hub: remove it, then push again"
            )
    _warn_of_local_paths(contents.get(CONFIG))
    api = HfApi(token=token)
    repository = make_repository(repo_id, token=token, private=private)
    if with_repository is not None:
        with_repository(repository)
    if revision is not None and not revision.startswith("refs/"):  # a pull request exists already, and is not a branch
        api.create_branch(repository, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repository,
        folder_path=str(root),
        allow_patterns=names,
        delete_patterns=_replaced(api.list_repo_files(repository, revision=revision)),
        revision=revision,
        commit_message=commit_message or "Upload posterior",
    )


def make_repository(repo_id: str, *, token: str | bool | None, private: bool | None) -> str:
    """Return the id of a repository with its owner. It is made if it is not there.

    Raises:
        HfHubHTTPError, OSError: if the Hub refuses the token, or cannot be reached.
    """
    return HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id


def _replaced(earlier: Sequence[str]) -> list[str]:
    """Return patterns that match exactly the files of an earlier push that an upload replaces.

    ``*`` of a pattern also matches "/", so a pattern of sidecars would match files of other folders.
    """
    return [
        glob.escape(name)
        for name in earlier
        if sidecars.is_sidecar(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _REPLACED)
    ]


def _check_beside(root: Path, names: Sequence[str], contents: Mapping[str, Any]) -> None:
    """Check that the files beside the card are of the posterior. A run into the directory replaces the posterior only.

    Args:
        names: the card, and the files beside it.
        contents: the content of the posterior's files.
    Raises:
        ValueError: naming a file of another posterior.
    """
    others = [name for name in names if name != CARD]
    fingerprint = fingerprint_of(contents) if others else ""
    for name in others:
        read_beside(root / name, fingerprint)


def _warn_of_local_paths(config: Any) -> None:
    """Warn of the paths on this computer that a posterior's config, which is not checked, records."""
    match config:
        case {"base_model": {"name_or_path": str(base)}} if is_local(base):
            warnings.warn(
                f"the base model is local ({visible_line(base)}): this path becomes public in {CONFIG}, and "
                "no other computer can load it. Push the base model and set its id as name_or_path"
            )
    while isinstance(config, Mapping):  # in continual learning a prior is a posterior with a prior of its own
        config = config.get("prior")
        match config:
            case {"posterior": str(place)} if is_local(place):
                warnings.warn(
                    f"a prior is a local posterior ({visible_line(place)}): this path becomes public in {CONFIG}. Push "
                    "that posterior, and give its id as prior= of the run to have the id recorded"
                )


def is_place(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a value is a path, or the text of a path or a repository's id."""
    return isinstance(value, str | os.PathLike)


def is_local(name: str | None) -> bool:
    """Return whether the name of a base model is a path on this computer rather than a repository id."""
    if not name:
        return False
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1 or os.path.isdir(name)


def _download(source: str, *, patterns: Sequence[str], folder: str, **download: Any) -> Path:
    if not is_repo_id(source):
        raise FileNotFoundError(f"{source} is neither a directory nor the id of a repository")
    prefix = f"{folder}/" if folder else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                source,
                allow_patterns=[prefix + pattern for pattern in patterns],
                ignore_patterns=[CHECKPOINT_FOLDERS],
                **download,
            )
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")  # one line: the command shows no more, and the advice is last
        raise FileNotFoundError(
            f"{source} is not a directory here, and the download from the Hub failed: {reason}. "
            "Check the name, the token and the network"
        ) from error
