"""M models of text and images as one model: ``generate``, ``score`` and training with ``pixel_values``.

All members see the same images. A model belongs here if its images stand at placeholder tokens among ``input_ids``
and no token sees a later one, so that the next token is predicted from the tokens and images before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.compat.transformers import CACHE, own_generation_hooks, takes_cache
from hf_bayes.members.pictures import PICTURES, pictures_of, take_pictures
from hf_bayes.members.trunk import has_axes
from hf_bayes.models.causal_lm import BayesianModelForCausalLM

_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Inputs that mark each token as text or as an image's placeholder."""
_TEXT = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "cache_position", *_TYPES)
_FOLLOWED = (
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
    "_expand_multimodal_outputs",
)
"""Methods of ``generate`` that a model may define by itself: we call them, or do not need them."""
_SEE_ALL = ("paligemma",)
"""Model types in which a prompt's tokens see later ones."""


class BayesianModelForImageTextToText(BayesianModelForCausalLM):
    """M models of text and images as one model. ``generate`` samples text from the posterior predictive."""

    task = "image_text_to_text"
    auto_class = AutoModelForImageTextToText

    @classmethod
    def check_core(cls, core: nn.Module) -> None:
        if reason := _reason_to_refuse(core):
            raise ValueError(
                f"{type(core).__name__} {reason}: it is not supported as a model of images and text. Take one such as "
                "Llava, Gemma 3, Idefics 3 or Qwen2-VL (docs/models.md)"
            )
        super().check_core(core)

    def refuse_unknown_inputs(self, inputs: dict[str, Any]) -> None:
        known = (*_TEXT, *PICTURES)
        if others := [name for name in tensors_in(inputs) if name not in known]:
            raise ValueError(
                f"inputs {', '.join(others)}: a Bayesian model of images and text takes {', '.join(known)}; which "
                "rows the entries of others belong to is not defined. Give images and text only"
            )

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.refuse_unknown_inputs(inputs)
        # positions on several axes depend on the images: the model computes them from the mask
        return inputs if has_axes(self.config) else super().numbered(inputs)

    def take_rows(self, inputs: dict[str, Any], index: Tensor) -> dict[str, Any]:
        pictures = pictures_of(inputs)
        rest = super().take_rows({k: v for k, v in inputs.items() if k not in pictures}, index)
        if not pictures:
            return rest
        return rest | take_pictures(pictures, self._placeholders(inputs["input_ids"]), index)

    def _placeholders(self, input_ids: Tensor) -> Tensor:
        """Return [B], the number of placeholder tokens of images in each row."""
        return input_ids.eq(_image_token(self.config)).sum(1)  # type: ignore[arg-type]

    # -- generate's own hooks -------------------------------------------------------------------------------------

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        positions: Tensor = cast(Any, self.core)._prepare_position_ids_for_generation(*args, **kwargs)
        return positions

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        updated: dict[str, Any] = cast(Any, self.core)._update_model_kwargs_for_generation(*args, **kwargs)
        return updated

    def _expand_inputs_for_generation(  # type: ignore[override]
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Repeat the rows for beams and samples, each with its own images."""
        pictures = pictures_of(kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in pictures}
        ids, rest = super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **rest)  # type: ignore[arg-type, misc]
        if pictures and expand_size > 1:
            assert input_ids is not None
            index = torch.arange(len(input_ids)).repeat_interleave(expand_size)
            pictures = take_pictures(pictures, self._placeholders(input_ids), index)
        return ids, rest | pictures

    def inputs_beside(self, prompt: dict[str, Any], sequences: Tensor) -> dict[str, Any]:
        ids = prompt.get("input_ids")
        if ids is None:
            return {}
        index = torch.arange(len(ids)).repeat_interleave(len(sequences) // len(ids))
        tensors = tensors_in(prompt)
        given = {name: tensors[name] for name in (*PICTURES, *_TYPES) if name in tensors}
        found = self.take_rows({"input_ids": ids, **given}, index)
        del found["input_ids"]
        new = sequences.shape[1] - ids.shape[1]
        for name in _TYPES:  # new tokens are text
            if name in found:
                found[name] = torch.nn.functional.pad(found[name], (0, new))
        return found


def _image_token(config: Any) -> int | None:
    """Return the token id of an image's placeholder; None for a model without one."""
    return next((value for name in ("image_token_id", "image_token_index")
                 if (value := getattr(config, name, None)) is not None), None)  # fmt: skip


def _reason_to_refuse(core: Any) -> str | None:
    """Return, in words, why members cannot share a forward pass or ``generate`` of this model; None if they can."""
    if not core.can_generate():
        return "writes no text"
    if _image_token(core.config) is None:
        return "has no placeholder token for images"
    if core.config.model_type in _SEE_ALL:
        return "lets the tokens of a prompt see later ones, so that a given text has no token-by-token probability"
    if not takes_cache(core):
        return f"takes no {CACHE}"
    if other := [name for name in own_generation_hooks(core) if name not in _FOLLOWED]:
        return f"has a {other[0]} of its own"
    return None
