"""Register our pipelines with ``transformers.pipeline``, which then loads the directory of a posterior, too.

Importing hf_bayes must not import transformers. The pipelines are registered at once if ``transformers.pipelines`` is
loaded already, and otherwise as soon as it is. transformers reads a configuration and a tokenizer before it makes a
pipeline. A posterior has no ``config.json``, and transformers would take the tokenizer of the base model in place of
the posterior's tokenizer. For our tasks ``hf_bayes.pipeline`` loads everything.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bayes.posteriors.tasks import TASKS

_HOST = "transformers.pipelines"
_FROM_PIPELINE = "_from_pipeline"
"""The private argument with which ``transformers.pipeline`` calls ``from_pretrained`` (``members.compat``)."""


class PosteriorToLoad:
    """The place of a posterior and the settings to load it, which ``transformers.pipeline`` loads as a model."""

    def __init__(self, source: str, settings: dict[str, Any]) -> None:
        self.source, self.settings = source, settings

    @classmethod
    def from_pretrained(cls, source: str, **settings: Any) -> PosteriorToLoad:
        """Keep the arguments of ``transformers.pipeline``, without those for the repository of the base model."""
        for name in ("config", "code_revision", _FROM_PIPELINE):
            settings.pop(name, None)
        revision = settings.pop("revision", None)
        if revision is not None:  # transformers has resolved it in another repository: its name is the given revision
            settings["revision"] = str(revision)
        return cls(source, {name: value for name, value in settings.items() if value is not None})


class RegisteredPipeline:
    """A pipeline for transformers' registry. Calling the class returns the pipeline of ``hf_bayes.pipeline``."""

    # transformers would load these from the base model, and not from the posterior
    _load_tokenizer: ClassVar[bool] = False
    _load_image_processor: ClassVar[bool] = False
    _load_feature_extractor: ClassVar[bool] = False
    _load_video_processor: ClassVar[bool] = False
    _load_processor: ClassVar[bool] = False

    def __new__(cls, model: Any, task: str, **settings: Any) -> Any:
        from hf_bayes.pipelines.factory import pipeline

        for name in ("dtype", "torch_dtype"):  # the model's, among its own settings
            settings.pop(name, None)
        if isinstance(model, PosteriorToLoad):
            return pipeline(task, model.source, **{**model.settings, **settings})
        return pipeline(task, model, **settings)


def register(host: ModuleType) -> None:
    """Register our pipelines with a loaded ``transformers.pipelines``."""
    names = [task.pipeline for task in TASKS.values()]
    empty = importlib.import_module("transformers").PreTrainedConfig
    for name in names:
        # each task needs its own class, since the registry writes the task on it
        kind = type("RegisteredPipeline", (RegisteredPipeline,), {})
        host.PIPELINE_REGISTRY.supported_tasks[name] = {"impl": kind, "pt": (PosteriorToLoad,), "type": "multimodal"}

    if TYPE_CHECKING:
        from transformers import AutoConfig as StockConfig
    else:
        StockConfig = host.AutoConfig

    class AutoConfig(StockConfig):
        """Return an empty configuration for our pipelines, whose models have the configuration of their base."""

        @classmethod
        def from_pretrained(cls, source: Any, **settings: Any) -> Any:  # type: ignore[override]
            if settings.get(_FROM_PIPELINE) in names:
                return empty()
            return super().from_pretrained(source, **settings)

    host.AutoConfig = AutoConfig  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Find ``transformers.pipelines`` as the other finders do, and register our pipelines after its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_when_loaded() -> None:
    """Register our pipelines now, or when transformers' pipelines are loaded; at most once."""
    host = sys.modules.get(_HOST)
    if host is not None and hasattr(host, "PIPELINE_REGISTRY"):
        if TASKS["causal_lm"].pipeline not in host.PIPELINE_REGISTRY.supported_tasks:
            register(host)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
