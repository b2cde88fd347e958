"""Packed rows: several documents one after the other, separated only by their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_bayes.members.compat.transformers import attention_of
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.models.base import BayesianModel
from hf_bayes.uncertainty.likelihoods import IGNORE


def refuse_mixed_documents(model: BayesianModel, theta: Tensor, inputs: dict[str, Any]) -> None:
    """Raise if a packed document depends on the document before it, since that would change the likelihood.

    Other tokens in the first document of each row must not change the log-likelihood of the later documents. Attention
    with masks (sdpa, eager) keeps documents apart. Models with a state between tokens may mix them, and so may
    attention that needs the ends of documents, because it does not get them for the rows of every member.

    Args:
        theta: [m, d], members that go through the model together.
        inputs: a batch with ``labels`` that all of them see; a batch that is not packed is not checked.
    """
    first = first_documents(inputs)
    if first is None or model.term_kind != "token":
        return
    ids = inputs["input_ids"]
    later = {**inputs, "labels": inputs["labels"].masked_fill(first, IGNORE)}
    other = {**later, "input_ids": torch.where(first, (ids + 1) % model.num_outputs, ids)}
    with torch.no_grad(), evaluating(model):
        same, changed = (model(**batch, theta=theta, folded=False).loss for batch in (later, other))
    rounding = 1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-3
    if not torch.allclose(same, changed, rtol=rounding, atol=0):
        raise ValueError(
            f"{type(model.core).__name__} with attention {attention_of(model.core.config)!r} lets packed "
            "documents see each other: their likelihood would depend on what they are packed with. Set packing=False "
            "and padding_free=False, or load the model with attn_implementation='sdpa' if it has attention alone"
        )


def first_documents(inputs: dict[str, Any]) -> Tensor | None:
    """Mark the tokens of each row's first document, [B, T] bool; None if every row is a single document."""
    if not is_flattened(inputs):
        return None
    begins = torch.nn.functional.pad(inputs["position_ids"].diff(dim=1) != 1, (1, 0))
    return begins.cumsum(1) == 0 if bool(begins.any()) else None


def is_flattened(inputs: dict[str, Any]) -> bool:
    """Return whether a batch has positions [B, T] in place of an attention mask, as collators that pack give it."""
    positions = inputs.get("position_ids")
    return positions is not None and positions.ndim == 2 and inputs.get("attention_mask") is None
