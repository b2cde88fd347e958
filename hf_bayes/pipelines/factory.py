"""``hf_bayes.pipeline``: make a pipeline of transformers with a saved posterior or a Bayesian model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, cast

import torch
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedTokenizerBase,
)

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.posterior import (
    check_tokenizer,
    load_feature_extractor,
    load_image_processor,
    load_processor,
    load_tokenizer,
)
from hf_bayes.pipelines.classification import (
    BayesianAudioClassificationPipeline,
    BayesianImageClassificationPipeline,
    BayesianTextClassificationPipeline,
)
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.image_text_to_text import BayesianImageTextToTextPipeline
from hf_bayes.pipelines.text_generation import BayesianTextGenerationPipeline
from hf_bayes.pipelines.token_classification import BayesianTokenClassificationPipeline
from hf_bayes.posteriors.hub import LOCATION, Location, download_of, is_place
from hf_bayes.posteriors.posterior import Posterior

_PIPELINES: tuple[type[BayesianPipeline], ...] = (
    BayesianTextGenerationPipeline,
    BayesianTextClassificationPipeline,
    BayesianTokenClassificationPipeline,
    BayesianImageClassificationPipeline,
    BayesianAudioClassificationPipeline,
    BayesianImageTextToTextPipeline,
)
_TASKS = {each.task_name: each for each in _PIPELINES}
_READERS: dict[str, tuple[Any, Any]] = {
    "tokenizer": (load_tokenizer, AutoTokenizer),
    "image_processor": (load_image_processor, AutoImageProcessor),
    "feature_extractor": (load_feature_extractor, AutoFeatureExtractor),
    "processor": (load_processor, AutoProcessor),
}
"""Name of a tokenizer or processor -> function that loads a posterior's own, auto class that loads any other."""


_ON = ("check_base", "calibrated")
"""Settings for loading that are True unless a call sets them."""


def pipeline(
    task: str | None = None,
    model: str | os.PathLike[str] | BayesianModel | None = None,
    tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
    *,
    image_processor: BaseImageProcessor | str | os.PathLike[str] | None = None,
    feature_extractor: Any = None,
    processor: Any = None,
    members: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: int | str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    base_model: Any = None,
    check_base: bool = True,
    prediction: str | None = None,
    calibrated: bool = True,
    **kwargs: Any,
) -> Any:
    """Return a pipeline with a saved posterior or a Bayesian model.

    Args:
        task: "bayesian-text-generation", "bayesian-text-classification", "bayesian-token-classification",
            "bayesian-image-classification", "bayesian-audio-classification" or "bayesian-image-text-to-text"; None
            takes the posterior's task.
        model: a posterior directory, a repository of the Hub, or a Bayesian model.
        tokenizer: a tokenizer or its place; None takes the posterior's tokenizer.
        image_processor, feature_extractor, processor: the same for images, for audio, and for images with text.
        members, dtype, device_map, trust_remote_code, base_model, check_base, prediction, calibrated: for loading, as
            in ``BayesianModelForCausalLM.from_pretrained``.
        device: as in transformers: None takes the first accelerator if there is one.
        dtype: also by its former name in transformers, ``torch_dtype``.
        kwargs: revision, subfolder, token, cache_dir, force_download and local_files_only, for loading in the same way;
            ``batch_size`` of the pipeline, or any argument of a call.
    Raises:
        ValueError: for an unknown task, a model of another kind, a tokenizer that is not the posterior's, a misspelt
            argument for loading, or two dtypes.
    """
    location = cast(Location, {name: kwargs.pop(name) for name in LOCATION if name in kwargs})
    loading: dict[str, Any] = {"members": members, "dtype": dtype, "device_map": device_map, "prediction": prediction,
                               "base_model": base_model, "check_base": check_base,
                               "calibrated": calibrated}  # fmt: skip
    readers = {"tokenizer": tokenizer, "image_processor": image_processor, "feature_extractor": feature_extractor,
               "processor": processor}  # fmt: skip
    _check_request(task, model)
    loading["dtype"] = _dtype_of(dtype, kwargs)
    BayesianPipeline.check_loading_arguments(kwargs)  # before the model is loaded
    if is_place(model):
        found = _from_posterior(task, model, readers, location, loading, trust_remote_code)
    else:
        _refuse_loading({**location, **loading})
        found = _from_model(task, model, readers, trust_remote_code)
    kwargs |= {found.kind.reads: found.reader} | ({} if device is None else {"device": device})
    return found.kind(model=found.model, task=found.kind.task_name, **kwargs)


class _Parts(NamedTuple):
    """The parts of a pipeline: its class, its model, and the object that reads its inputs."""

    kind: type[BayesianPipeline]
    model: BayesianModel
    reader: Any


def _from_posterior(
    task: str | None,
    place: str | os.PathLike[str],
    readers: dict[str, Any],
    location: Location,
    loading: dict[str, Any],
    trust_remote_code: bool,
) -> _Parts:
    """Load a posterior, and the tokenizer or processor beside it unless one is given."""
    posterior = Posterior.from_pretrained(place, **location)
    kind = _TASKS[task] if task is not None else _of_task(posterior.config.task)
    load, _ = _READERS[kind.reads]
    reader = _only(kind, readers)
    remote: dict[str, Any] = {"trust_remote_code": trust_remote_code, "base_model": loading["base_model"]}
    if reader is None:
        reader = load(place, posterior=posterior, **remote, **location)
    download = download_of(location)
    model = kind.model_class.from_pretrained(posterior, trust_remote_code=trust_remote_code, **download, **loading)
    return _checked(kind, model, reader, {"trust_remote_code": trust_remote_code, **download})


def _from_model(task: str | None, model: Any, readers: dict[str, Any], trust_remote_code: bool) -> _Parts:
    """Take a model in memory, and the tokenizer or processor that is given."""
    if task is None and not isinstance(model, BayesianModel):
        raise ValueError(
            f"a pipeline needs a posterior's directory or repository, or a Bayesian model, got {type(model).__name__}"
        )
    kind = _TASKS[task] if task is not None else _of_task(model.task)
    return _checked(kind, model, _only(kind, readers), {"trust_remote_code": trust_remote_code})


def _checked(kind: type[BayesianPipeline], model: BayesianModel, reader: Any, hub: dict[str, Any]) -> _Parts:
    """Check that the model and its tokenizer belong together, after loading a tokenizer that is given by its place.

    Args:
        hub: the arguments of ``from_pretrained`` for such a tokenizer: settings of a download, and trust in its code.
    """
    kind.check_model(model)
    if reader is None:
        raise ValueError(f"a model in memory comes without its {kind.reads.replace('_', ' ')}: give {kind.reads}=")
    if is_place(reader):
        _, auto_class = _READERS[kind.reads]
        reader = auto_class.from_pretrained(reader, **hub)
    if model.posterior is not None and kind.reads in ("tokenizer", "processor"):
        check_tokenizer(model.posterior, getattr(reader, "tokenizer", reader))
    return _Parts(kind, model, reader)


def _check_request(task: str | None, model: Any) -> None:
    """Raise for an unknown task, and without a model."""
    if task is not None and task not in _TASKS:
        names = ", ".join(map(repr, _TASKS))
        raise ValueError(f"unknown task {task!r}: expected one of {names}, or none: pipeline(model=...) finds its task")
    if model is None:
        raise ValueError(f"a pipeline needs a posterior: give model=, its directory or repository (got {task=} alone)")


def _dtype_of(dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Take ``torch_dtype``, the name of dtype in older code for transformers, out of ``kwargs``; return the dtype."""
    former = kwargs.pop("torch_dtype", None)
    if former is not None and dtype is not None:
        raise ValueError(f"a pipeline has one dtype, got dtype={dtype} and torch_dtype={former}: give dtype alone")
    return dtype if former is None else former


def _refuse_loading(settings: dict[str, Any]) -> None:
    """Raise if settings for loading are given with a model that is loaded already."""
    given = [name for name, value in settings.items() if value is not None and value is not (name in _ON)]
    if given:
        raise ValueError(f"{', '.join(given)}: the model is loaded already, give this to its from_pretrained")


def _of_task(task: str) -> type[BayesianPipeline]:
    """Return the pipeline of a task of ``posteriors.tasks``."""
    return next(each for each in _PIPELINES if each.model_class.task == task)


def _only(kind: type[BayesianPipeline], readers: dict[str, Any]) -> Any:
    """Return the given tokenizer or processor of the kind that the pipeline uses."""
    if others := [name for name, given in readers.items() if given is not None and name != kind.reads]:
        raise ValueError(f"{kind.task_name} reads its inputs with {kind.reads}=, got {others[0]}=: leave that out")
    return readers[kind.reads]
