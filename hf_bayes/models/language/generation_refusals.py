"""Ways of generating text that a model with a member axis does not support, and why."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_bayes.members.cache import holds_states_alone
from hf_bayes.members.compat.transformers import CACHE, cache_of
from hf_bayes.models.language.token_uncertainty import TraceStreamer

_ASSISTED = "drafted tokens are checked several at a time, and uncertainty is recorded token by token"
_OTHER_LOOP = "it runs a decoding loop of its own, whose steps are not recorded"
_SECOND_PROMPT = "it calls the model a second time in every step, with another prompt"
_REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type"),
        _ASSISTED,
    ),
    **dict.fromkeys(
        ("custom_generate", "penalty_alpha", "dola_layers", "num_beam_groups", "constraints", "force_words_ids"),
        _OTHER_LOOP,
    ),
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids"), _SECOND_PROMPT),
    "inputs_embeds": "records are of tokens, and such a prompt has none: give input_ids, or call the model itself",
    "prefill_chunk_size": "pieces of the prompt would be recorded as tokens",
    "token_healing": "it generates the end of the prompt anew, and that would be recorded, too",
}
"""Settings of ``generate`` that are refused, and why."""
_NEUTRAL = {"num_beam_groups": 1, "guidance_scale": 1}
"""Values of old generation configs that ask for nothing."""
_READ_AGAIN = "beams are read once more when they have ended, as input_ids and their mask alone: give the whole text"
"""A mask is longer than ``input_ids`` if a cache holds the beginning of the text."""
_CACHE = "this cache is not known to keep the rows of members apart"
_CACHES = ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")
"""The last three are former names in transformers of static caches for layers with a sliding window."""
_SUPPORTED = "Supported are greedy search, sampling and beam search, with dynamic or static caches"


def refuse_unsupported(kwargs: dict[str, Any], default: GenerationConfig, prompt: Tensor | None = None) -> None:
    """Raise for ways of generating whose caches or loops do not support members, and for an empty prompt.

    Args:
        kwargs: the arguments of ``generate``.
        default: the generation config of the model, for settings that are not in the call.
        prompt: [rows, T], if there is one.
    """
    if isinstance(prompt, Tensor) and prompt.shape[-1:] == (0,):
        raise ValueError(
            f"generate continues prompts of one token or more, got {list(prompt.shape)}: leave input_ids out to begin "
            "with the bos token"
        )
    settings = _Settings(kwargs, default)
    for name, reason in _REFUSED.items():
        value = settings.get(name)
        if isinstance(value, Tensor | nn.Module):
            refuse(f"{name}={type(value).__name__}", reason)
        if value not in (None, False, _NEUTRAL.get(name)):
            refuse(f"{name}={value!r}", reason)
    if (beams := settings.get("num_beams") or 1) > 1:
        _refuse_of_beams(beams, kwargs, prompt)
    implementation = settings.get("cache_implementation")
    if implementation not in (None, *_CACHES):
        refuse(f"cache_implementation={implementation!r}", _CACHE)
    if (cache := cache_of(kwargs)) is not None:
        _refuse_cache(cache, settings.get("use_cache"))


def refuse_static_cache(kwargs: dict[str, Any], default: GenerationConfig) -> None:
    """Raise for a static cache; arguments as of ``refuse_unsupported``.

    It is written into, and would keep the means of uncertain keys and values without their noise.
    """
    implementation, cache = _Settings(kwargs, default).get("cache_implementation"), cache_of(kwargs)
    if implementation not in (None, "dynamic"):
        asked = f"cache_implementation={implementation!r}"
    elif isinstance(cache, StaticCache):
        asked = f"{CACHE}={type(cache).__name__}"
    else:
        return
    raise ValueError(
        f"generate({asked}) is not supported by a single pass: a static cache is written into, and would keep the "
        "means of keys and values without their uncertainty. Leave it out, which gives a dynamic cache, or predict by "
        "members"
    )


def refuse(asked: str, reason: str) -> NoReturn:
    """Raise for a setting of ``generate``."""
    raise ValueError(f"generate({asked}) is not supported for an ensemble: {reason}. {_SUPPORTED}")


class _Settings:
    """The settings of a call of ``generate``: its arguments, then its configuration, then the model's own."""

    def __init__(self, kwargs: dict[str, Any], default: GenerationConfig) -> None:
        self.kwargs, self.configs = kwargs, (kwargs.get("generation_config"), default)

    def get(self, name: str) -> Any:
        """Return the first value that is not None."""
        values = (self.kwargs.get(name), *(getattr(config, name, None) for config in self.configs))
        return next((value for value in values if value is not None), None)


def _refuse_of_beams(beams: int, kwargs: dict[str, Any], prompt: Tensor | None) -> None:
    """Raise for arguments with which beams cannot be scored."""
    mask = kwargs.get("attention_mask")
    if isinstance(kwargs.get("streamer"), TraceStreamer):
        refuse(f"num_beams={beams} of a stream", "beams are chosen among when all of them have ended")
    for name in ("position_ids", "encoder_hidden_states"):
        if kwargs.get(name) is not None:
            refuse(f"num_beams={beams}, {name}", _READ_AGAIN)
    if mask is not None and isinstance(prompt, Tensor) and mask.shape[-1] != prompt.shape[-1]:
        refuse(f"num_beams={beams}, attention_mask of {mask.shape[-1]} positions", _READ_AGAIN)


def _refuse_cache(cache: Any, use_cache: Any) -> None:
    """Raise for a cache of an unknown kind, or a cache that would not be used."""
    known = type(cache) in (DynamicCache, StaticCache)
    if not known or cache.offloading:
        refuse(f"{CACHE}={type(cache).__name__}{' that is offloaded' if known else ''}", _CACHE)
    if holds_states_alone(cache):
        refuse(
            f"{CACHE}={type(cache).__name__} of states without keys",
            "it does not say how many tokens it has read, and the whole text would be read once more. Give the text "
            "without a cache",
        )
    if use_cache is False:
        refuse(
            f"{CACHE}={type(cache).__name__}, use_cache=False",
            "every token would put the whole text into the cache once more",
        )
