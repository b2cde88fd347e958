"""Posteriors on the Hugging Face Hub: fetch and push directories."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_bayes.core.text_safety import visible_line
from hf_bayes.posteriors import sidecars, storage

CARD = "README.md"
DOWNLOAD = ("token", "cache_dir", "force_download", "local_files_only")
"""How anything comes from the Hub: what holds for a posterior holds for its base model."""
_TOKEN = re.compile(rb"\bhf_(?:oauth_|jwt_)?[A-Za-z0-9]{20,}")
FILES = ("*.json", "*.safetensors", "*.md", *sidecars.NAMES)
"""Patterns of the files that a posterior is made of."""
# Files of an earlier push that a later one no longer has: a member left there would make the posterior unreadable, a
# chat template left there would be taken for the posterior's.
_REPLACED = ["members/*", "adapter_config.json", "adapter_model.safetensors", "covariance.safetensors", "trace.json",
             *sidecars.NAMES]  # fmt: skip


def fetch(
    source: str | os.PathLike[str],
    *,
    patterns: Sequence[str],
    revision: str | None = None,
    subfolder: str | None = None,
    **download: Any,
) -> Path:
    """A local directory: ``source`` itself, or the Hub's repository of that id, downloaded.

    Args:
        source: a directory or a repository id.
        patterns: which files to download; a directory is used as it is.
        revision: branch, tag or commit of a repository.
        subfolder: relative to the directory or repository.
        download: of ``DOWNLOAD``, as ``huggingface_hub.snapshot_download`` takes them.
    Raises:
        OSError: if there is neither.
        ValueError: if ``subfolder`` leads out of the directory.
    """
    parts = Path(subfolder or "").parts
    if os.path.isabs(subfolder or "") or ".." in parts:
        raise ValueError(f"subfolder must be a relative path inside {source}, got {subfolder!r}")
    path = Path(source)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{source} is a file: give the directory of the posterior")
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
    """Upload a saved posterior: the files of its manifest, with tokenizer and processor, and its card. Checkpoints,
    optimizers, ``training_args.bin`` (a pickle that may hold a token) and whatever else lies there stay.

    Returns:
        The commit: a text, its address.
    Raises:
        ValueError, OSError: if the posterior is damaged, or a text in it looks like an access token.
    """
    root = Path(directory)
    storage.recover(root)
    contents = storage.read_directory(root, format=storage.POSTERIOR, raw=sidecars.is_sidecar)
    names = [*contents, storage.MANIFEST, *([CARD] if (root / CARD).exists() else [])]
    for name in names:
        if not name.endswith(".safetensors") and _TOKEN.search((root / name).read_bytes()):
            raise ValueError(
                f"{root / name} holds what looks like an access token of the Hub: remove it, then push again"
            )
    base = contents.get("posterior_config.json", {}).get("base_model", {})
    base = base.get("name_or_path") if isinstance(base, dict) else None
    if is_local(base):
        warnings.warn(
            f"the base model is local ({visible_line(base)}): this path becomes public in posterior_config.json, and "
            "nobody else can load it. Push the base model and set its id as name_or_path"
        )
    api = HfApi(token=token)
    repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/"):  # a pull request is there, and no branch
        api.create_branch(repository, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repository,
        folder_path=str(root),
        allow_patterns=names,
        delete_patterns=_REPLACED,
        revision=revision,
        commit_message=commit_message or "Upload posterior",
    )


def is_local(name: str | None) -> bool:
    """Whether a base model's name is a path on this computer rather than a repository id."""
    if not name:
        return False
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1 or Path(name).is_dir()


def _download(source: str, *, patterns: Sequence[str], folder: str, **download: Any) -> Path:
    try:
        validate_repo_id(source)
    except HFValidationError:
        raise FileNotFoundError(f"{source} is neither a directory nor the id of a repository") from None
    prefix = f"{folder}/" if folder else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                source,
                allow_patterns=[prefix + pattern for pattern in patterns],
                ignore_patterns=["checkpoint-*"],
                **download,
            )
        )
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{source} is no directory here, and the Hub did not give it: {error}. "
            "Check the name, the token and the network"
        ) from error
