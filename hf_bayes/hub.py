"""Posteriors on the Hugging Face Hub: fetch, model card, push. Knows directories and JSON, neither models nor theta."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_bayes import storage
from hf_bayes.tasks import TASKS

CARD = "README.md"
TEMPLATE = Path(__file__).parent / "templates" / "posterior_card.md"
DOWNLOAD = ("token", "cache_dir", "force_download", "local_files_only")
"""How anything comes from the Hub: what holds for a posterior holds for its base model."""
_REPORTED = ("nll", "perplexity", "accuracy", "ece", "brier", "mse")  # metrics that go into the card's model-index
_TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)?[A-Za-z0-9]{20,}")
_HOME = re.compile(r"(?:/home/|/Users/|/root/|[A-Za-z]:\\Users\\)[^\s`'\")|]*")
# Of an earlier push, what a later one no longer has: a member left there would make the posterior unreadable.
_REPLACED = ["members/*", "adapter_config.json", "adapter_model.safetensors", "covariance.safetensors", "trace.json"]


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


def render_card(config: Mapping[str, Any], *, adapter: bool, repo_id: str | None = None) -> str:
    """The model card of a posterior.

    Args:
        config: ``PosteriorConfig.to_dict()``.
        adapter: whether the parameters are a peft adapter's.
        repo_id: where it will be found; None leaves a placeholder.
    """
    base, method = config["base_model"]["name_or_path"], config["method"]
    local = is_local(base)
    task = TASKS[config["task"]]
    pipeline_tag, suffix = task.tag, task.suffix
    data = ModelCardData(
        library_name="peft" if adapter else "hf_bayes",
        pipeline_tag=pipeline_tag,
        tags=["hf_bayes", "bayesian", method["name"], *(["lora"] if adapter else [])],
        base_model=None if local else base,
        base_model_relation=None if local else ("adapter" if adapter else "finetune"),
        model_name=(repo_id or "posterior").split("/")[-1],
        eval_results=_eval_results(config["metrics"], pipeline_tag) or None,
    )
    chains = config["member_chains"]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        config=config,
        method=method,
        suffix=suffix,
        adapter=adapter,
        answers=_answers(config["task"], config["head"]),
        unit=task.unit,
        noise_std=_inline(config["head"].get("noise_std")),
        base="the base model" if not base else _inline(Path(base).name if local else base),
        base_is_local=local,
        repo_id=repo_id or "user/this-posterior",
        num_chains=len(set(chains)) or method.get("num_chains"),
        prior=_inline(", ".join(f"{key} = {value}" for key, value in _flat(config["prior"]).items())) or "not recorded",
        fields={key: _inline(value) for key, value in _flat(method).items() if key != "name"},
        diagnostics=_table(config["diagnostics"], skip=("verdict", "converged")),
        verdict=_inline(config["diagnostics"].get("verdict") or "not assessed"),
        metrics=_table(config["metrics"]),
    )
    return _HOME.sub("<local path>", str(card))


def add_tags(directory: str | os.PathLike[str], tags: str | Sequence[str]) -> None:
    """Put further tags into the card of a saved posterior, each once.

    Raises:
        ValueError: if one is no text.
    """
    tags = [tags] if isinstance(tags, str) else list(tags)
    if odd := [tag for tag in tags if not isinstance(tag, str)]:
        raise ValueError(f"tags of a model card are texts, got {odd[0]!r}: give one text or a list of them")
    file = Path(directory) / CARD
    card = ModelCard.load(file)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    card.save(file)


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> CommitInfo:
    """Upload a saved posterior: the files of its manifest and its card. Checkpoints, optimizers, ``training_args.bin``
    (a pickle that may hold a token) and whatever else lies there stay.

    Returns:
        The commit: a text, its address.
    Raises:
        ValueError, OSError: if the posterior is damaged, or a text in it looks like an access token.
    """
    root = Path(directory)
    storage.recover(root)
    contents = storage.read_directory(root, format=storage.POSTERIOR)
    names = [*contents, storage.MANIFEST, *([CARD] if (root / CARD).exists() else [])]
    for name in names:
        if not name.endswith(".safetensors") and _TOKEN.search((root / name).read_text()):
            raise ValueError(
                f"{root / name} holds what looks like an access token of the Hub: remove it, then push again"
            )
    base = contents.get("posterior_config.json", {}).get("base_model", {})
    base = base.get("name_or_path") if isinstance(base, dict) else None
    if is_local(base):
        warnings.warn(
            f"the base model is local ({base}): this path becomes public in posterior_config.json, and nobody "
            "else can load it. Push the base model and set its id as name_or_path"
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


def _answers(task: str, head: Mapping[str, Any]) -> str:
    """What the model predicts: "classes" (words among them), several "labels", or "numbers"."""
    if "noise_std" in head:
        return "numbers"
    several = task != "token_classification" and head.get("problem_type") == "multi_label_classification"
    return "labels" if several else "classes"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _table(values: Mapping[str, Any], skip: Sequence[str] = ()) -> dict[str, str]:
    found = {key: value for key, value in _flat(values).items() if key not in skip and value is not None}
    return {_inline(key): _inline(value) for key, value in found.items()}


def _inline(value: Any) -> str:
    """One line that cannot break a table or a heading."""
    if value is None:
        return "not defined"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = f"{len(value)} values" if len(value) > 8 else ", ".join(map(_inline, value))
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _eval_results(metrics: Mapping[str, Any], task: str) -> list[EvalResult]:
    results = []
    for key, value in metrics.items():
        name = key.removeprefix("eval_")
        if name in _REPORTED and isinstance(value, (int, float)):
            results.append(
                EvalResult(
                    task_type=task,
                    dataset_type="held-out",
                    dataset_name="held-out data",
                    metric_type=name,
                    metric_value=value,
                )
            )
    return results
