"""The location of a posterior's base model, and the refusal of unsuitable locations and models before loading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_bayes.core.layout import modules_of
from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.posteriors.hub import Location, download_of, is_local, is_place
from hf_bayes.posteriors.posterior import Posterior

NOTED_REVISION = "loaded_revision"
"""The attribute of a model that holds the revision with which ``load_pretrained`` has loaded it."""


def locate(posterior: Posterior, given: Any, location: Location, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """Return the base model's name or folder, and the other keyword arguments of ``from_pretrained``.

    Args:
        posterior: the posterior, which records a name.
        given: another name or folder; None, or a model, means the recorded one.
        location: as ``Posterior.from_pretrained`` takes it.
        trust_remote_code: whether code of the base model's repository may run.
    Returns:
        ("", ...) if neither names one.
    Raises:
        ValueError: if the name is the posterior's own folder or repository, whose code never runs.
        FileNotFoundError: if the recorded name is a path that does not exist.
    """
    recorded = posterior.config.base_model
    hub: dict[str, Any] = {**download_of(location), "trust_remote_code": trust_remote_code}
    is_given = is_place(given)
    if given is not None and not is_given and not isinstance(given, nn.Module):
        raise ValueError(
            f"base_model must be a name, a folder or a transformers model, got {type(given).__name__}: leave it out to "
            "take the name that the posterior records"
        )
    name = str(given) if is_given else recorded["name_or_path"] or ""
    if name and _is_own(posterior, name):
        raise ValueError(
            f"the base model of {_what(posterior)} is given as {name!r}, which is the posterior's own place: no code "
            "or model is taken from there. Give the base model's name or folder as base_model="
        )
    if not is_given and is_local(name) and not os.path.isdir(name):
        raise FileNotFoundError(_missing(posterior, name))
    return name, hub if is_given else {**hub, "revision": recorded["revision"] or "main"}


def revision_of(model: nn.Module, core: nn.Module) -> str | None:
    """Return the branch, tag or commit that a model was loaded from, as far as it is known; None stands for "main".

    transformers does not tell. peft's config may (``LoraConfig(revision=)``), and ``load_pretrained`` notes it.
    """
    if isinstance(model, PeftModel):
        given = model.peft_config[model.active_adapter].revision
        if given is not None:
            return str(given)
    noted: str | None = getattr(core, NOTED_REVISION, None)
    return noted


def cached_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a repository's branch or tag in the Hub's cache; None for a folder.

    A model of another branch than the one that is known here has other weights: their fingerprint refuses the wrong
    ones when a posterior is loaded.

    Args:
        revision: None is the main branch. One that the cache does not have is returned as it is.
    """
    if not is_repo_id(name) or os.path.isdir(name):
        return None
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision


@contextmanager
def reaching(posterior: Posterior, name: str, given: Any) -> Iterator[None]:
    """Name the place if loading fails, with a hint to ``base_model=`` if it was recorded: it may have been a path."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(name):
            raise
        if given is not None:
            reason = str(error).partition("\n")[0]
            raise OSError(f"{name!r} is no folder here, and cannot be loaded from the Hub: {reason}") from error
        raise OSError(f"{_missing(posterior, name)} ({error})") from error


def refuse_adapted(model: nn.Module) -> None:
    """Raise for a base model with an adapter, because its layers would count as layers of the base model."""
    if isinstance(model, PeftModel) or _adapted_layers(model):
        raise ValueError(
            f"base_model is a {type(model).__name__} with an adapter of peft: give the model without it "
            "(peft_model.unload(), or merge_and_unload() if its adapter belongs to the base), or a name or folder "
            "without an adapter"
        )


def refuse_bare_adapter(model: nn.Module) -> None:
    """Raise for an adapter in a model that is not a ``PeftModel``: a posterior would not record it.

    transformers adds such adapters itself (``add_adapter``, ``load_adapter``, ``from_pretrained`` of an adapter's
    folder), and ``get_base_model`` of a ``PeftModel`` leaves its adapter in the layers.
    """
    if not isinstance(model, PeftModel) and (layers := _adapted_layers(model)):
        raise ValueError(
            f"{type(model).__name__} has an adapter of peft in its layers, first {layers[0]}, and is not a PeftModel: "
            "a posterior would not record the adapter. Wrap the model: get_peft_model(model, config) in place of "
            "model.add_adapter(config), or PeftModel.from_pretrained(base, folder, is_trainable=True) for a trained "
            "adapter. To keep a trained adapter as it is, load it by PeftModel.from_pretrained(base, folder), merge it "
            "(merge_and_unload()), save the merged model, and load that as the base"
        )


def _adapted_layers(model: nn.Module) -> list[str]:
    return list(modules_of(model, BaseTunerLayer))


def _is_own(posterior: Posterior, name: str) -> bool:
    """Return whether a name leads to the posterior's own files, here or on the Hub."""
    if posterior.folder is None:
        return False
    own = Path(posterior.folder)
    repository = own.parent.parent  # in the cache of the Hub, where there may be other revisions of it
    is_whole_repository = own.parent.name == "snapshots" and repository.name.startswith("models--")
    if os.path.isdir(name):
        return Path(os.path.realpath(name)).is_relative_to(repository if is_whole_repository else own)
    return is_whole_repository and name.lower() == (posterior.source or "").lower()


def _missing(posterior: Posterior, name: str) -> str:
    return (
        f"{_what(posterior)} records its base model as {name!r}, and {os.path.abspath(name)} is no folder here: give "
        "the folder, or the name on the Hub, as base_model="
    )


def _what(posterior: Posterior) -> str:
    return posterior.source or "this posterior"
