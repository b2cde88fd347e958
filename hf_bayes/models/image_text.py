"""M models of text and images as one model: ``generate``, ``score`` and training with ``pixel_values``.

All members see the same images. A model belongs here if its images stand at placeholder tokens among ``input_ids``
and no token sees a later one, so that the next token is predicted from the tokens and images before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.compat.transformers import CACHE, own_generation_hooks, takes_cache
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.members.pictures import (
    COUNTS,
    PICTURES,
    CountedImages,
    one_image_per_row,
    pictures_of,
    placeholders_of,
    shows_owners,
    take_pictures,
)
from hf_bayes.members.trunk import has_axes
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianCausalLMOutput, BayesianModelForCausalLM
from hf_bayes.models.prediction_mode import predicts
from hf_bayes.models.predictors import MemberLogLik

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
_BY_ROW = ("idefics2", "idefics3", "smolvlm")
"""Model types that read images as [rows, images, ...]."""


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
        known = (*_TEXT, *PICTURES, COUNTS)
        if others := [name for name in tensors_in(inputs) if name not in known]:
            raise ValueError(
                f"inputs {', '.join(others)}: a Bayesian model of images and text takes {', '.join(known)}; which "
                "rows the entries of others belong to is not defined. Give images and text only"
            )

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.refuse_unknown_inputs(inputs)
        inputs = _as_read(inputs)
        # positions on several axes depend on the images: the model computes them from the mask
        return inputs if has_axes(self.config) else super().numbered(inputs)

    def take_rows(self, inputs: dict[str, Any], index: Tensor) -> dict[str, Any]:
        pictures = pictures_of(inputs)
        rest = super().take_rows({k: v for k, v in inputs.items() if k not in pictures}, index)
        if not pictures:
            return rest
        if inputs.get("input_ids") is None:
            raise ValueError("images belong to the rows whose input_ids have their placeholders: give input_ids")
        return rest | self._take_pictures(pictures, inputs["input_ids"], index, inputs.get(COUNTS))

    def _take_pictures(
        self, pictures: dict[str, Tensor], input_ids: Tensor, index: Tensor, counts: Tensor | None = None
    ) -> dict[str, Tensor]:
        by_row = self.config.model_type in _BY_ROW
        return take_pictures(pictures, self._placeholders(input_ids), index, by_row=by_row, counts=counts)

    def row_slices(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a batch in pieces of whole rows; in one piece if it does not show which images belong to which row."""
        pictures, ids = pictures_of(inputs), inputs.get("input_ids")
        known = not pictures or COUNTS in inputs
        if not known and ids is not None:
            known = shows_owners(pictures, self._placeholders(ids), by_row=self.config.model_type in _BY_ROW)
        yield from super().row_slices(inputs) if known else (inputs,)

    def _placeholders(self, input_ids: Tensor) -> Tensor:
        """Return [B], the number of placeholder tokens of images in each row."""
        return placeholders_of(input_ids, _image_token(self.config))

    # -- passes of several members ------------------------------------------------------------------------------------

    def reads_rows_apart(self, inputs: dict[str, Any]) -> bool:
        """Return whether each row of a batch is one row, too, for every module with random weights.

        The part that reads images has images (or patches) as rows. If its weights are random, several members can read
        a batch in one pass only if each row has one image.
        """
        pictures = pictures_of(inputs)
        # a step of generate keeps the sizes of images that an earlier step has read
        if "pixel_values" not in pictures or not self.members.names_of_images:
            return True
        ids = inputs.get("input_ids")
        return ids is not None and one_image_per_row(pictures, self._placeholders(ids))

    def passes(self, inputs: dict[str, Any]) -> list[Tensor]:
        return super().passes(inputs) if self.reads_rows_apart(inputs) else list(self.members.chunks(self.current, 1))

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        if len(theta) == 1 or self.reads_rows_apart(inputs):
            return super().log_lik(theta, inputs, folded=folded, weights=weights)
        found = []
        for member in range(len(theta)):
            own = inputs
            if folded:
                rows = num_rows_of(inputs) // len(theta)
                own = self.take_rows(inputs, torch.arange(member * rows, (member + 1) * rows))
            some = slice(member, member + 1)
            weight = None if weights is None else weights[some]
            found.append(super().log_lik(theta[some], own, folded=folded, weights=weight))
        return MemberLogLik(*map(torch.cat, zip(*found, strict=True)))

    @predicts
    def _answer(self, inputs: dict[str, Any], cache: Any, *args: Any) -> BayesianCausalLMOutput:
        if cache is not None and inputs.get("position_ids") is None:  # generate gives the positions of each step
            self._repeat_offsets(num_rows_of(inputs))
        return super()._answer(_as_read(inputs), cache, *args)

    def _repeat_offsets(self, num_rows: int) -> None:
        """Repeat, for each member, the offsets of positions behind the images of earlier tokens.

        Qwen2-VL keeps them from its last pass, which may have read the rows of a few members only.
        """
        backbone: Any = self.core.base_model
        offsets = getattr(backbone, "rope_deltas", None)
        num_members = self.causal.num_stored(self._num_cached)
        if offsets is not None and num_rows <= len(offsets) != num_members * num_rows:
            backbone.rope_deltas = offsets[:num_rows].repeat(num_members, 1)

    # -- generate's own hooks -------------------------------------------------------------------------------------

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs(_as_read(model_kwargs))

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
            pictures = self._take_pictures(pictures, input_ids, index, kwargs.get(COUNTS))
        return ids, rest | pictures

    def inputs_beside(self, prompt: dict[str, Any], sequences: Tensor) -> dict[str, Any]:
        ids = prompt.get("input_ids")
        if ids is None:
            return {}
        index = torch.arange(len(ids)).repeat_interleave(len(sequences) // len(ids))
        tensors = tensors_in(prompt)
        given = {name: tensors[name] for name in (*PICTURES, *_TYPES, COUNTS) if name in tensors}
        found = self.take_rows({"input_ids": ids, **given}, index)
        del found["input_ids"]
        new = sequences.shape[1] - ids.shape[1]
        for name in _TYPES:  # new tokens are text
            if name in found:
                found[name] = torch.nn.functional.pad(found[name], (0, new))
        return found


def counting_images(model: BayesianModel, collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collator for a model whose batches can be divided by rows (``CountedImages``).

    Args:
        model: a model of any task; where it reads no images with text, ``collate`` itself is returned.
        collate: rows -> a batch.
    """
    if not isinstance(model, BayesianModelForImageTextToText) or model.config.model_type in _BY_ROW:
        return collate
    return CountedImages(collate, _image_token(model.config))


def _as_read(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs without the number of images of each row, which the wrapped model does not take."""
    return {name: value for name, value in inputs.items() if name != COUNTS}


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
