"""Load a posterior's base model with its adapter and members, its tokenizer and its processors."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoQuantizationConfig  # type: ignore[attr-defined]

from hf_bayes.core.layout import Layout
from hf_bayes.core.text_safety import readable_errors
from hf_bayes.models.loading import base_model as base
from hf_bayes.models.loading import lora_layers
from hf_bayes.models.loading.base_location import locate, reaching, refuse_adapted
from hf_bayes.models.loading.checkpoint_weights import Loaded, load_pretrained, warn_of_lost_weights
from hf_bayes.models.loading.student_network import student_network
from hf_bayes.models.restoration import BaseState, unwrapped
from hf_bayes.posteriors.hub import Location
from hf_bayes.posteriors.posterior import Posterior, require_members
from hf_bayes.posteriors.student import DISTILLED

_TOKENIZER = ("tokenizer_config.json",)
_READERS = ("preprocessor_config.json", "processor_config.json")
_UNCHECKED = (
    ". If you know that the difference does not matter, check_base=False predicts in spite of it (--check_base false "
    "of hf-bayes evaluate, score, generate and demo)"
)
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")


class LoadedPosterior(NamedTuple):
    """A posterior on its base model.

    Attributes:
        model: the base model, with the posterior's adapter if it has one.
        layout: the random parameters.
        theta: [M, d], the members.
        posterior: the posterior.
        own_base: the state of a base model that the caller gave, as it was before; None for any other.
    """

    model: nn.Module
    layout: Layout
    theta: Tensor
    posterior: Posterior
    own_base: BaseState | None


@contextlib.contextmanager
def loaded(
    directory_or_repo: str | os.PathLike[str] | Posterior,
    task: str,
    auto_class: Any,
    *,
    members: int | None,
    location: Location,
    dtype: torch.dtype | str | None,
    device_map: Any,
    trust_remote_code: bool,
    base_model: str | os.PathLike[str] | PreTrainedModel | None,
    check_base: bool,
    prediction: str | None = None,
) -> Iterator[LoadedPosterior]:
    """Yield a posterior on its base model. If the block raises, a ``base_model`` of the caller is given back unchanged.

    A dtype to which the caller's model has been converted stays.

    Args:
        task: the task that the posterior must have.
        auto_class: the auto class that loads its base model.
        location: the location of the posterior, as ``Posterior.from_pretrained`` takes it.
        prediction: "distilled" takes the network of the posterior's student as the only member.
    Raises:
        ValueError: if the posterior is of another task, it was made with another base model (naming the difference;
            ``check_base=False`` overrides), ``members`` is not a number of members, it has no student, or ``dtype`` is
            not a dtype of models.
        OSError: if there is no posterior, or no base model, to be found.
    """
    with readable_errors(), contextlib.ExitStack() as until_the_end:
        if members is not None:
            require_members(members)
        wanted = _dtype_of(dtype)
        posterior = read(directory_or_repo, location)
        what = posterior.source or "this posterior"
        if posterior.config.task != task:
            raise ValueError(f"{what} is a posterior for {posterior.config.task}, not {task}: load it with that class")
        found = _load_base(posterior, auto_class, base_model, location, device_map, trust_remote_code)
        refuse_adapted(found.model)
        base.refuse_spread(found.model)
        loaded_as = found.model.dtype
        is_own = isinstance(base_model, nn.Module)
        before = BaseState(found.model, lora_layers.changed_by(posterior.adapter_config) if is_own else ())
        model = until_the_end.enter_context(_fitted(found.model, before, posterior, check_base))
        if not check_base or posterior.config.base_model["fingerprint"].get("weights") is None:
            warn_of_lost_weights(found, posterior.layout, what)
        if members == 1 or posterior.config.num_members == 1:
            warnings.warn(f"{what}: 1 member: epistemic uncertainty is 0 by construction, not by evidence")
        theta = student_network(posterior, members) if prediction == DISTILLED else posterior.members(members)
        if wanted is not None and wanted != loaded_as:
            model = model.to(wanted)
        model.eval()
        theta = theta.to(next(model.parameters()).device)
        yield LoadedPosterior(model, posterior.layout, theta, posterior, before if is_own else None)


@contextlib.contextmanager
def _fitted(core: nn.Module, before: BaseState, posterior: Posterior, check_base: bool) -> Iterator[nn.Module]:
    """Yield the base model with the posterior's adapter after all checks; an error of the block leaves it unchanged."""
    what, adapter = posterior.source or "this posterior", posterior.adapter_config
    modes = [(module, module.training) for module in core.modules()]
    model = core if adapter is None else lora_layers.build(core, adapter, posterior.layout, posterior.config.task, what)
    try:
        _check_parameters(model, posterior.layout, what)
        _check_base(model, cast(PreTrainedModel, core), posterior, what, check_base)
        yield model
    except BaseException:
        if isinstance(model, PeftModel):
            unwrapped(model)
        before.restore()
        for module, mode in modes:
            module.training = mode
        raise


def _check_base(model: nn.Module, core: PreTrainedModel, posterior: Posterior, what: str, check_base: bool) -> None:
    if not check_base:
        return
    problems = base.differences(posterior.config.base_model, base.describe(model, core, posterior.layout))
    if problems:
        raise ValueError(
            f"{what} belongs to another base model: it has {'; '.join(problems)}. Give the right one, of the "
            "right revision, with all that was done to it before training (resize_token_embeddings, merge_and_unload), "
            "as base_model= (--base_model)"
            f"{_UNCHECKED}"
        )
    if problems := base.head_differences(posterior.config.head, core.config):
        raise ValueError(
            f"the base model given for {what} has a config with {'; '.join(problems)}: set that "
            f"in its config, or give the model's name or folder in its place{_UNCHECKED}"
        )


def read(directory_or_repo: str | os.PathLike[str] | Posterior, location: Location | None = None) -> Posterior:
    """Read the posterior at a place, or return the given one.

    Raises:
        ValueError: for a revision or subfolder of a posterior in memory, and as ``Posterior.from_pretrained``.
    """
    location = location or {}
    if not isinstance(directory_or_repo, Posterior):
        return Posterior.from_pretrained(directory_or_repo, **location)
    if given := [name for name in ("revision", "subfolder") if location.get(name) is not None]:
        raise ValueError(f"{', '.join(given)}: the posterior is in memory already, give this where it is read")
    return directory_or_repo


@readable_errors()
def load_tokenizer(
    directory_or_repo: str | os.PathLike[str],
    *,
    posterior: Posterior | None = None,
    base_model: Any = None,
    trust_remote_code: bool = False,
    **location: Unpack[Location],
) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved with a posterior, else the base model's tokenizer.

    Files that the posterior's manifest does not list are not read, and code in its directory never runs.

    Args:
        posterior: the posterior at that location, if it has been read already.
        base_model: another path or name of the base model; None, or the model itself, means the recorded name.
        location: the location of the posterior, as ``Posterior.from_pretrained`` takes it; the settings of downloads
            (the token, the cache) apply to the base model, too.
        trust_remote_code: whether code of the base model's repository may run.
    Raises:
        ValueError: if the posterior was made with another tokenizer, its place is unknown, or it needs code.
    """
    posterior = posterior or Posterior.from_pretrained(directory_or_repo, **location)
    context = (base_model, trust_remote_code, location)
    with _source(posterior, directory_or_repo, "tokenizer", _TOKENIZER, *context) as (source, hub):
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
    if posterior.sidecars.has(*_TOKENIZER):
        tokenizer.name_or_path = str(posterior.source or directory_or_repo)  # and not a folder that is gone
    check_tokenizer(posterior, tokenizer)
    return tokenizer


@readable_errors()
def load_image_processor(directory_or_repo: str | os.PathLike[str], **options: Any) -> BaseImageProcessor:
    """Load the image processor saved with a posterior, else the base model's; arguments as in ``load_tokenizer``.

    Raises:
        OSError: if neither has one.
        ValueError: if its place is unknown, or it needs code.
    """
    return _load_reader("image processor", AutoImageProcessor, _READERS, directory_or_repo, **options)  # type: ignore[no-any-return]


def check_tokenizer(posterior: Posterior, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the posterior was made with another tokenizer."""
    expected = posterior.config.base_model["fingerprint"]["tokenizer"]
    found = base.fingerprint_tokenizer(tokenizer)
    if expected is not None and found != expected:
        raise ValueError(
            f"this tokenizer (fingerprint {found[:12]}) is not the one the posterior was made with ({expected[:12]}): "
            "its vocabulary, merges or normalisation differ. Use the base model's own"
        )


def load_feature_extractor(directory_or_repo: str | os.PathLike[str], **options: Any) -> Any:
    """Load the feature extractor saved with a posterior, else the base model's, as ``load_image_processor`` does."""
    return _load_reader("feature extractor", AutoFeatureExtractor, _READERS, directory_or_repo, **options)


def load_processor(directory_or_repo: str | os.PathLike[str], **options: Any) -> Any:
    """Load the processor of images and text saved with a posterior, else the base model's, in the same way."""
    return _load_reader("processor", AutoProcessor, _PROCESSOR, directory_or_repo, **options)


def _load_reader(
    what: str,
    auto_class: Any,
    names: tuple[str, ...],
    directory_or_repo: Any,
    *,
    posterior: Posterior | None = None,
    base_model: Any = None,
    trust_remote_code: bool = False,
    **location: Unpack[Location],
) -> Any:
    posterior = posterior or Posterior.from_pretrained(directory_or_repo, **location)
    context = (base_model, trust_remote_code, location)
    with _source(posterior, directory_or_repo, what, names, *context) as (source, hub):
        try:
            return auto_class.from_pretrained(source, **hub)
        except OSError as error:
            raise OSError(
                f"no {what} beside the posterior {directory_or_repo}, nor of its base model {source}: give it as "
                f"{what.replace(' ', '_')}= ({error})"
            ) from error


@contextlib.contextmanager
def _source(
    posterior: Posterior,
    directory_or_repo: Any,
    what: str,
    names: tuple[str, ...],
    given: Any,
    trust_remote_code: bool,
    location: Location,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of a tokenizer or processor and the arguments to load it: sidecars, or the base model.

    Sidecars lie in a private folder while the block runs. Errors of the block name the posterior in its place.

    Args:
        names: the sidecars must include one of these files.
    """
    if posterior.sidecars.has(*names):
        code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        base_name = None
        if trust_remote_code:
            base_name, hub = locate(posterior, given, location, trust_remote_code)
            code["code_revision"] = hub.get("revision")
        place = posterior.source or directory_or_repo
        with posterior.sidecars.folder(code_from=base_name) as folder:
            try:
                yield str(folder), code
            except Exception as error:
                words = str(error).replace(str(folder), str(place))
                raise ValueError(f"the {what} saved with the posterior {place} cannot be loaded: {words}") from error
        return
    name, hub = locate(posterior, given, location, trust_remote_code)
    if not name:
        raise ValueError(
            f"{directory_or_repo} holds no {what} and does not name its base model (it was built from a config): "
            f"give the {what}"
        )
    with reaching(posterior, name, given):
        yield name, hub


def _load_base(
    posterior: Posterior,
    auto_class: Any,
    given: Any,
    location: Location,
    device_map: Any,
    trust_remote_code: bool,
) -> Loaded:
    recorded = posterior.config.base_model
    # adapters that came without a record of their base take it as transformers finds it
    dtype = None if recorded["dtype"] is None else getattr(torch, recorded["dtype"])
    if isinstance(given, nn.Module):
        return Loaded(cast(PreTrainedModel, given))
    name, hub = locate(posterior, given, location, trust_remote_code)
    if not name:
        raise ValueError(
            "the posterior does not name its base model (it was built from a config): give it as base_model="
        )
    head = posterior.config.head
    with reaching(posterior, name, given):
        config = AutoConfig.from_pretrained(name, **hub)
        base.check_head(head, config, posterior.layout)
        config = AutoConfig.from_pretrained(name, **hub, **base.head_settings(head))
    if "quantization_config" in head and getattr(config, "quantization_config", None) is None:  # quantised on loading
        hub["quantization_config"] = AutoQuantizationConfig.from_dict(head["quantization_config"])
    return load_pretrained(auto_class, name, config=config, dtype=dtype or "auto", device_map=device_map, **hub)


def _dtype_of(given: Any) -> torch.dtype | None:
    """Return the dtype into which a base model is converted; None leaves its own."""
    if given is None or given == "auto":
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"dtype must be a floating point type such as torch.bfloat16 or 'bfloat16', got {given!r}: None keeps the "
            "one that the posterior was made with"
        )
    return found


def _check_parameters(model: nn.Module, layout: Layout, where: Any) -> None:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    found = {name: tuple(tensor.shape) for name, tensor in tensors}
    for name, shape in layout.named_shapes.items():
        if found.get(name) != shape:
            got = "no such parameter" if name not in found else f"shape {list(found[name])}"
            raise ValueError(f"{where}: the base model has {got} where {name} of shape {list(shape)} is expected")
