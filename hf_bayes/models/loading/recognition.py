"""The task of a model's head, found in the mappings from which transformers' auto classes choose.

An unknown head is refused: trained under another likelihood its outputs would mean something else, and no class could
load the posterior.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_bayes.members.compat import transformers as compat
from hf_bayes.posteriors.tasks import SUPPORTED, TASKS, Task

_FIRST = ("image_text_to_text", "audio_classification")
"""Tasks that are looked up first: some models that take images are listed as causal language models, too."""


def mappings() -> dict[str, str | None]:
    """Return {name of a mapping of model classes in transformers: name of its auto class, None without one}."""
    content = vars(modeling_auto)
    names = [name for name in content if name.startswith("MODEL_") and name.endswith("MAPPING")]
    loaders = compat.loaders_of_mappings()
    return {name: loaders.get(id(content[name])) for name in names}


def task_of(model: nn.Module) -> Task:
    """Return the task of a transformers model.

    A class of transformers, or a subclass of one, is looked up in the mappings of the auto classes. The task of another
    class follows from its registration (``AutoModel....register``), its ``config.auto_map``, or the end of its name.

    Raises:
        ValueError: for a head of another kind, naming it and what is supported.
    """
    tasks = sorted(TASKS.values(), key=lambda task: task.name not in _FIRST)
    found: list[str] = []
    for kind in type(model).__mro__:
        if kind is PreTrainedModel:
            break
        found = _loaders_of(kind, getattr(model, "config", None))
        if chosen := [task for task in tasks if task.auto_class in found]:
            return chosen[0]
        if found:
            break
    loaders = " and ".join(found)
    head = f"loaded by {loaders}" if found else "in none of the mappings of transformers' auto classes"
    raise ValueError(
        f"{type(model).__name__} is {head}, and this head is not supported. Supported are {SUPPORTED}. Load the base "
        "with one of these auto classes; a class of your own needs a name that ends as theirs do (docs/models.md)"
    )


def _loaders_of(kind: type, config: Any) -> list[str]:
    """Return the names of the auto classes that load this class; a mapping without one stands under its own name."""
    native = kind.__module__.startswith("transformers.")
    loaders = mappings()
    found = [loaders[name] or name for name in compat.mappings_with(kind, loaders, by_name=native)]
    if native:
        return found
    auto_map = getattr(config, "auto_map", None) or {}
    found += [name for name, code in auto_map.items() if str(code).split(".")[-1] == kind.__name__ and "Model" in name]
    return found or [task.auto_class for task in TASKS.values() if kind.__name__.endswith(task.suffix)]
