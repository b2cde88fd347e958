"""A posterior of a language model as a repository that transformers runs without hf_bayes.

transformers loads ``custom_generate/generate.py`` of a repository for ``generate(..., custom_generate=repository)``.
The repository here is an ordinary posterior directory of draws with this one file added. hf_bayes writes the file from
a template, into which no text of the posterior goes, and never executes it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from hf_bayes.distributions.approximations import Draws
from hf_bayes.posteriors import lora_config, storage
from hf_bayes.posteriors.config import library_versions
from hf_bayes.posteriors.file_formats import MODEL_PREFIX
from hf_bayes.posteriors.lora_keys import adapter_keys
from hf_bayes.posteriors.model_card import CUSTOM_GENERATE, write_card
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_approximation
from hf_bayes.posteriors.storage import disk

_TEMPLATE = Path(__file__).parent / "templates" / "generate.py.jinja"
_REQUIREMENTS = "torch\nsafetensors\ntransformers>=5.20\n"
_USE = "Use it with hf_bayes, or export one member with --member or --mean"


def generate_file() -> str:
    """Return the text of ``custom_generate/generate.py``, which is the same for every posterior."""
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{ version }}", library_versions()["hf-bayes"])


def export_custom_generate(
    posterior: Posterior,
    directory: str | os.PathLike[str],
    *,
    members: int | None = None,
    repo_id: str | None = None,
    **card: Any,
) -> Posterior:
    """Write a repository from which ``model.generate(custom_generate=...)`` of transformers runs the members.

    Args:
        directory: a new or empty directory.
        members: the number of members. None takes all draws, or as many draws of a Gaussian as ``from_pretrained``.
        repo_id: the repository id in the examples of the model card.
        card: fields of the model card (``model_card.CardFields``).
    Returns:
        The posterior of draws that the repository holds.
    Raises:
        ValueError: if the repository cannot represent the posterior, naming the reason, or the directory is not empty.
        OSError: if the directory cannot be written. No file is left then.
    """
    check_exportable(posterior)
    draws = as_draws(posterior, members)
    with storage.new_directory(directory) as staging:
        draws.save_pretrained(staging, repo_id=repo_id, **card)
        file = staging / CUSTOM_GENERATE
        file.parent.mkdir()
        disk.write(file, generate_file().encode())
        disk.write(file.with_name("requirements.txt"), _REQUIREMENTS.encode())
        write_card(staging, repo_id=repo_id, **card)
    return draws


def as_draws(posterior: Posterior, members: int | None = None) -> Posterior:
    """Return the posterior of the members that ``from_pretrained`` would load, as stored draws.

    Draws of a Gaussian are those of the seed of the run. Its single pass and its student do not belong to draws.

    Args:
        members: the number of members; None takes all draws, or 10 draws of a Gaussian.
    """
    config = posterior.config
    theta = posterior.members(members)
    if config.approximation == "draws" and len(theta) == config.num_members:
        return posterior
    chain = torch.zeros(len(theta), dtype=torch.int64)
    if stored := posterior.approximation.chains:
        chain = torch.tensor(stored)[torch.arange(len(theta)) * len(stored) // len(theta)]
    found = with_approximation(posterior, Draws(theta, chain), prediction="members")
    kept: dict[str, Any] = {
        name: fit
        for name in ("calibration", "abstention")
        if (fit := getattr(config, name)).get("prediction") == "members" and fit["num_members"] in (None, len(theta))
    }
    if members is None:  # the members that a Gaussian predicts with have its figures
        kept["metrics"] = config.metrics
    return dataclasses.replace(found, config=dataclasses.replace(found.config, **kept), student=None)


def check_exportable(posterior: Posterior) -> None:
    """Check that ``generate.py`` predicts as hf_bayes does with this posterior.

    Raises:
        ValueError: naming the reason why it does not.
    """
    config, what = posterior.config, posterior.source or "this posterior"
    if config.task != "causal_lm":
        raise ValueError(
            f"custom_generate is for posteriors of language models, got {what}, a posterior for {config.task}. {_USE}"
        )
    reason = None
    if config.prediction != "members":
        reason = f"predicts by {config.prediction!r}, and an exported file averages members"
    elif "quantization_config" in config.head:
        reason = "has a quantised base model, whose layers the exported file does not know"
    elif posterior.adapter_config is not None:
        reason = _problem_of_lora(posterior)
    if reason is not None:
        raise ValueError(f"{what} {reason}. {_USE}")


def _problem_of_lora(posterior: Posterior) -> str | None:
    assert posterior.adapter_config is not None
    start = posterior.adapter_config.get("init_lora_weights")
    if start in lora_config.REPEATABLE:
        return f"has a LoRA with init_lora_weights={start!r}, which changes the base model's weights"
    keys = [key.removeprefix(MODEL_PREFIX) for key in adapter_keys(posterior.layout.names).values()]
    adapted = {key.split(".lora_A.")[0] for key in keys if ".lora_A." in key}
    for key, shape in zip(keys, posterior.layout.shapes, strict=True):
        module = key.replace(".base_layer.", ".").rpartition(".")[0]
        if ".lora_embedding_" in key or (".lora_" in key and len(shape) != 2):
            return f"has a LoRA on a layer that is not linear ({key})"
        if module in adapted:
            return f"has a LoRA and other random parameters in one layer ({key})"
    return None
