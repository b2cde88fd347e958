"""Text, images or audio in, records out: pipelines of transformers whose records carry uncertainty."""

from __future__ import annotations

import os
from typing import Any

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
from hf_bayes.models.loading import (
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
from hf_bayes.posteriors.hub import DOWNLOAD
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
"""What pipelines read inputs with: how a posterior's is loaded, and another one."""


def pipeline(
    task: str | None = None,
    model: str | os.PathLike[str] | BayesianModel | None = None,
    tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
    *,
    image_processor: BaseImageProcessor | str | os.PathLike[str] | None = None,
    feature_extractor: Any = None,
    processor: Any = None,
    members: int | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: int | str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    base_model: Any = None,
    check_base: bool = True,
    prediction: str | None = None,
    **kwargs: Any,
) -> Any:
    """A pipeline with a saved posterior or a Bayesian model.

    Args:
        task: "bayesian-text-generation", "bayesian-text-classification", "bayesian-token-classification",
            "bayesian-image-classification", "bayesian-audio-classification" or "bayesian-image-text-to-text"; None
            takes that of the posterior.
        model: a posterior directory, a repository of the Hub, or a Bayesian model.
        tokenizer: a tokenizer or where to load one; None takes the posterior's.
        image_processor, feature_extractor, processor: likewise, where the inputs are images, audio, or images and text.
        members, revision, subfolder, token, cache_dir, force_download, local_files_only, dtype, device_map,
            trust_remote_code, base_model, check_base, prediction: for loading, as in
            ``BayesianModelForCausalLM.from_pretrained``.
        device: as in transformers: None takes the first accelerator if there is one.
        kwargs: for the pipeline: ``batch_size`` or any argument of a call.
    Raises:
        ValueError: for an unknown task, a model of another kind, or a tokenizer that is not the posterior's.
    """
    if task is not None and task not in _TASKS:
        names = ", ".join(map(repr, _TASKS))
        raise ValueError(f"unknown task {task!r}: expected one of {names}, or none: pipeline(model=...) finds its task")
    if model is None:
        raise ValueError(f"a pipeline needs a posterior: give model=, its directory or repository (got {task=} alone)")
    location: dict[str, Any] = {"revision": revision, "subfolder": subfolder, "token": token, "cache_dir": cache_dir,
                                "force_download": force_download, "local_files_only": local_files_only}  # fmt: skip
    loading: dict[str, Any] = {
        "members": members, "dtype": dtype, "device_map": device_map, "prediction": prediction,
    }  # fmt: skip
    all_given = location | loading | {"base_model": base_model}
    given = [name for name, value in all_given.items() if value is not None and value is not False]
    given += [] if check_base else ["check_base"]
    if given and not isinstance(model, str | os.PathLike):
        raise ValueError(f"{', '.join(given)}: the model is loaded already, give this to its from_pretrained")
    posterior = Posterior.from_pretrained(model, **location) if isinstance(model, str | os.PathLike) else None
    pipeline_class = _find(model, posterior) if task is None else _TASKS[task]
    reads, model_class = pipeline_class.reads, pipeline_class.model_class
    load, auto_class = _READERS[reads]
    reader = _only(
        pipeline_class,
        tokenizer=tokenizer,
        image_processor=image_processor,
        feature_extractor=feature_extractor,
        processor=processor,
    )
    bayesian: Any = model
    if posterior is not None:
        remote: dict[str, Any] = {"trust_remote_code": trust_remote_code, "base_model": base_model}
        if reader is None:
            reader = load(model, posterior=posterior, **remote, **location)
        download = {name: location[name] for name in DOWNLOAD}
        bayesian = model_class.from_pretrained(posterior, check_base=check_base, **remote, **download, **loading)
    pipeline_class.check_model(bayesian)
    if reader is None:
        raise ValueError(f"a model in memory comes without its {reads.replace('_', ' ')}: give {reads}=")
    if isinstance(reader, str | os.PathLike):
        reader = auto_class.from_pretrained(reader, trust_remote_code=trust_remote_code)
    if bayesian.posterior is not None and reads in ("tokenizer", "processor"):
        check_tokenizer(bayesian.posterior, getattr(reader, "tokenizer", reader))
    kwargs |= {reads: reader} | ({} if device is None else {"device": device})
    return pipeline_class(model=bayesian, task=pipeline_class.task_name, **kwargs)


def _find(model: Any, posterior: Posterior | None) -> type[BayesianPipeline]:
    """The pipeline of a posterior's, or a model's, task."""
    if posterior is not None:
        found = posterior.config.task
    elif isinstance(model, BayesianModel):
        found = model.task
    else:
        raise ValueError(
            f"a pipeline needs a posterior's directory or repository, or a Bayesian model, got {type(model).__name__}"
        )
    return next(each for each in _PIPELINES if each.model_class.task == found)


def _only(pipeline_class: type[BayesianPipeline], **processors: Any) -> Any:
    """What is given of the one that the pipeline reads its inputs with."""
    task, reads = pipeline_class.task_name, pipeline_class.reads
    if others := [name for name, given in processors.items() if given is not None and name != reads]:
        raise ValueError(f"{task} reads its inputs with {reads}=, got {others[0]}=: leave that out")
    return processors[reads]
