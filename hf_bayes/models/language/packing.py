"""Packed rows: several documents one after the other, separated only by their positions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hf_bayes.members.compat.transformers import attention_of
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.base import BayesianModel

NUM_NEAR = 2
"""The positions of a document that are compared: its first ones, which a mixing model changes most."""
SMALL_CHANGE = {torch.float16: 0.1, torch.bfloat16: 0.1}
"""The largest relative change of a hidden state that rounding explains; 0.01 for other dtypes.

Models that keep documents apart compute the same numbers again, bit for bit. Mixtures of experts are an exception: they
multiply other numbers of tokens by an expert, which may round differently. That changed hidden states by 1e-5 at most
in float32. Rounding to bfloat16 in every one of 16 to 48 layers changes them by 0.02 to 0.1. In models
that mix documents, the change was 0.2 (Falcon-H1) to 1.8.
"""
_FOR_THE_HEAD = ("logits_to_keep", "num_items_in_batch")


def refuse_mixed_documents(model: BayesianModel, theta: Tensor, inputs: dict[str, Any]) -> None:
    """Raise if a packed document depends on the document before it, since that would change the likelihood.

    Other tokens in every second document must not change the hidden states at the first positions of the documents
    after it. The median over these positions decides: in a mixture of experts, rounding sends a few tokens to other
    experts. Attention whose masks are made from the positions keeps documents apart. Models with a state between tokens
    may mix them, and so may attention that gets no positions (OPT), or that needs the ends of documents, because it
    does not get them for the rows of every member.

    Args:
        theta: [m, d], members that go through the model together.
        inputs: a batch that all of them see; a batch that is not packed is not checked.
    """
    if first_documents(inputs) is None or model.term_kind != "token":
        return
    ids, begins = inputs["input_ids"], _begins(inputs)
    changed = (begins.cumsum(1) % 2 == 0).expand_as(ids)
    near = begins & ~changed
    for _ in range(NUM_NEAR - 1):
        near = near | (torch.nn.functional.pad(near[:, :-1], (1, 0)) & ~changed)
    other = torch.where(changed, (ids + 1) % model.num_outputs, ids)
    same, moved = (_hidden_states(model, theta, {**inputs, "input_ids": each})[:, near] for each in (ids, other))
    bound = SMALL_CHANGE.get(_computing_dtype(model), 0.01) * same.norm(dim=-1)
    if bool(((moved - same).norm(dim=-1) - bound).median() > 0):
        attention = attention_of(model.core.config)
        has_masks = attention in (None, "sdpa", "eager")
        advice = "" if has_masks else ", or try attn_implementation='sdpa': its masks separate documents in most models"
        raise ValueError(
            f"{type(model.core).__name__} with attention {attention!r} lets packed documents see each other: their "
            f"likelihood would depend on what they are packed with. Do not pack rows (in TRL: packing=False and "
            f"padding_free=False){advice}"
        )


def _hidden_states(model: BayesianModel, theta: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Return the hidden states [m, B, T, h] before the head, in float32; m is 1 if only the head is random."""
    inputs = {name: value for name, value in without_labels(inputs).items() if name not in _FOR_THE_HEAD}
    with torch.no_grad(), evaluating(model), model.members.bind(theta):
        hidden, _ = cast(Any, model).head.hidden({**inputs, "use_cache": False})
    states: Tensor = hidden.float().unflatten(0, (-1, len(inputs["input_ids"])))
    return states


def _computing_dtype(model: BayesianModel) -> torch.dtype:
    """Return the dtype in which the model computes here."""
    device = model.theta.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def first_documents(inputs: dict[str, Any]) -> Tensor | None:
    """Mark the tokens of each row's first document, [B, T] bool; None if every row is a single document."""
    if not is_flattened(inputs):
        return None
    begins = _begins(inputs)
    return begins.cumsum(1) == 0 if bool(begins.any()) else None


def _begins(inputs: dict[str, Any]) -> Tensor:
    """Mark the first token of every document but the first of its row, [B, T] bool."""
    return torch.nn.functional.pad(inputs["position_ids"].diff(dim=1) != 1, (1, 0))


def is_flattened(inputs: dict[str, Any]) -> bool:
    """Return whether a batch has positions [B, T] in place of an attention mask, as collators that pack give it."""
    positions = inputs.get("position_ids")
    return positions is not None and positions.ndim == 2 and inputs.get("attention_mask") is None
