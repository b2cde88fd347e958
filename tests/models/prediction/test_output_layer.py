"""The output layer of a classifier."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from hf_bayes import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.prediction.output_layer import OutputLayer, find_output_layer
from tests.tiny_models import PAD, batch, inputs_of, tiny_bert, tiny_vit, with_lora

SIZES = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_labels": 3, "pad_token_id": PAD,
}  # fmt: skip


def roberta() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**SIZES, max_position_embeddings=40)).eval()


def llama() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES)).eval()


def found(model: BayesianModel, inputs: dict) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layer's name, its hidden states, its logits there, and the model's logits."""
    with model.members.bind(model.theta), torch.no_grad():
        name = find_output_layer(model, inputs)
        layer = OutputLayer(model, name)
        hidden = layer.hidden(model, inputs)
        return name, hidden, layer.logits(model, hidden), model.members.logits(inputs)[0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (tiny_bert, "classifier"), (tiny_vit, "classifier"), (roberta, "classifier.out_proj"), (llama, "score"),
        (lambda: with_lora(tiny_bert(), modules_to_save=["classifier"]), "classifier"),
        (lambda: with_lora(tiny_bert(), target_modules=["query", "classifier"], modules_to_save=None), "classifier"),
    ],
    ids=["bert", "vit", "roberta", "llama", "saved", "lora"],
)  # fmt: skip
def test_the_layer_maps_hidden_states_to_logits(make, expected: str) -> None:
    core = make()
    with attach(core, subspace="trainable" if hasattr(core, "peft_config") else "last_layer") as model:
        name, hidden, logits, whole = found(model, inputs_of(core))
    assert name == expected
    assert hidden.shape == (3, 16)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)


def test_a_text_classifier_chooses_the_last_token() -> None:
    with attach(llama(), subspace="last_layer") as model:
        _, hidden, logits, whole = found(model, batch(padding="right"))
    assert hidden.shape == (3, 16)
    torch.testing.assert_close(logits, whole)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    core = tiny_bert()
    core.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits.square()))
    with attach(core, subspace="last_layer") as model, pytest.raises(ValueError, match="no module that maps hidden"):
        found(model, batch())
    with attach(tiny_bert(), subspace="last_layer") as model, pytest.raises(ValueError, match="has no such module"):
        OutputLayer(model, "score")
