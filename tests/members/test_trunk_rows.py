"""The rows of all members where a model reads them beside the trunk: in pooling, and between its blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    FlaubertConfig,
    FlaubertForSequenceClassification,
    XLMConfig,
    XLMForSequenceClassification,
    XLNetConfig,
    XLNetForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from hf_bayes.core.layout import decoder_blocks, select
from hf_bayes.models.attaching import attach
from tests import multimodal
from tests import tiny_models as models
from tests.members import subject_models
from tests.members.reference import mixture, relative_error, scattered, separate_gradients, separate_logits
from tests.tiny_models import VOCABULARY, batch, tiny_bert


def _by_mean(dtype: torch.dtype) -> nn.Module:
    model = subject_models.modernbert(dtype)
    model.config.classifier_pooling = "mean"
    return model


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["modernbert", "wav2vec2"])
def test_pooling_by_a_mask_reads_the_rows_of_all_members(kind: str, rows: int) -> None:
    if kind == "modernbert":
        model, inputs = _by_mean(torch.float64), batch(rows, padding="right")
    else:
        model, inputs = multimodal.wav2vec2(torch.float64), multimodal.sounds(kind, rows, dtype=torch.float64)
        inputs["attention_mask"] = (torch.arange(40) < 30 + torch.arange(rows)[:, None]).long()
    layout = select(model, "last_layer")
    theta, labels = scattered(model, layout), torch.arange(rows) % 3
    losses, gradients = separate_gradients(model, layout, theta, [{**inputs, "labels": labels}] * len(theta))
    with attach(model, theta, subspace="last_layer") as bayesian:
        assert bayesian.members.num_trunk_blocks > 0
        leaf = theta.clone().requires_grad_()
        found = bayesian(**inputs, labels=labels, theta=leaf)
        found.loss.sum().backward()
        with torch.no_grad():
            logits = bayesian(**inputs).logits
    assert relative_error(logits, mixture(separate_logits(model, layout, theta, inputs))) < 1e-13
    assert relative_error(found.loss.detach(), losses) < 1e-13
    assert relative_error(leaf.grad, gradients) < 1e-12


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("config", "make"), [(XLMConfig, XLMForSequenceClassification), (FlaubertConfig, FlaubertForSequenceClassification)]
)
def test_parallel_lists_of_parts_are_no_trunk(config: type, make: type, rows: int) -> None:
    fields = config(vocab_size=VOCABULARY, emb_dim=16, n_layers=3, n_heads=2, dropout=0.0, attention_dropout=0.0,
                    num_labels=3, summary_type="first", pad_index=0, max_position_embeddings=32)  # fmt: skip
    model = models._build(lambda: make(fields), 0, torch.float64)
    assert decoder_blocks(model) is None
    layout = select(model, r"ffns\.")
    theta, inputs = scattered(model, layout), batch(rows)
    expected = mixture(separate_logits(model, layout, theta, inputs))
    with torch.no_grad(), attach(model, theta, subspace=r"ffns\.") as bayesian:
        assert relative_error(bayesian(**inputs).logits, expected) < 1e-13


@pytest.mark.parametrize("length", [2, 3, 6])  # as many positions as rows, half as many as folded rows, or as many
def test_positions_are_not_taken_for_rows(length: int) -> None:
    fields = XLNetConfig(vocab_size=VOCABULARY, d_model=8, n_layer=2, n_head=2, d_inner=8, num_labels=3, dropout=0.0)
    model = models._build(lambda: XLNetForTokenClassification(fields), 0, torch.float64)
    layout = select(model, "classifier")
    theta, inputs = scattered(model, layout), batch(2, length)
    expected = mixture(separate_logits(model, layout, theta, inputs))
    with torch.no_grad(), attach(model, theta, subspace="classifier") as bayesian:
        assert relative_error(bayesian(**inputs).logits, expected) < 1e-13


def test_blocks_after_a_random_module_are_not_cut() -> None:
    """Check blocks between which the model calls a random module that is registered after them."""
    model = tiny_bert(dtype=torch.float64)
    encoder, between = model.bert.encoder, model.bert.pooler.dense

    def interleaved(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> object:
        for block in encoder.layer:
            hidden_states = between(block(hidden_states, attention_mask))
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)

    encoder.forward = interleaved
    layout = select(model, "pooler")
    theta = scattered(model, layout, 4)
    expected = mixture(separate_logits(model, layout, theta, batch()))
    with torch.no_grad(), attach(model, theta, subspace="pooler") as bayesian:
        assert relative_error(bayesian(**batch()).logits, expected) < 1e-13
