"""Tests of the heads that are attached and of their likelihoods; every other head is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel, ViTConfig

from hf_bayes.models.attaching import MODELS, attach
from hf_bayes.models.loading.recognition import task_of
from hf_bayes.posteriors.tasks import TASKS
from tests import multimodal
from tests import tiny_models as models
from tests.members.subject_models import bert_tagger

BERT = models.tiny_bert().config
REFUSED = {
    "AutoModelForMaskedLM": lambda: transformers.BertForMaskedLM(BERT),
    "AutoModelForMultipleChoice": lambda: transformers.BertForMultipleChoice(BERT),
    "AutoModelForNextSentencePrediction": lambda: transformers.BertForNextSentencePrediction(BERT),
    "AutoModelForQuestionAnswering": lambda: transformers.BertForQuestionAnswering(BERT),
    "AutoModelForPreTraining": lambda: transformers.BertForPreTraining(BERT),
    "AutoModel": lambda: transformers.BertModel(BERT),
    "AutoModelForMaskedImageModeling": lambda: transformers.ViTForMaskedImageModeling(
        ViTConfig(**multimodal.VISION, encoder_stride=4)
    ),
    "AutoModelForCTC": lambda: transformers.Wav2Vec2ForCTC(multimodal.wav2vec2().config),
    "AutoModelForAudioFrameClassification": lambda: transformers.Wav2Vec2ForAudioFrameClassification(
        multimodal.wav2vec2().config
    ),
}  # fmt: skip


@pytest.mark.parametrize("loader", REFUSED)
def test_another_head_is_refused_by_name_and_left_as_it_was(loader: str) -> None:
    model = REFUSED[loader]()
    before = {name: (module.training, dict(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__} is loaded by .*\b{loader}\b.* not supported"
    ) as error:
        attach(model, subspace=".", noise_std=1.0)
    assert all(task.auto_class in str(error.value) for task in TASKS.values())
    assert {name: (module.training, dict(vars(module))) for name, module in model.named_modules()} == before
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point())


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (models.tiny_llama, "causal_lm"),
        (models.tiny_gpt2, "causal_lm"),  # it stands among the models for pretraining, too
        (models.tiny_bert, "sequence_classification"),
        (lambda: bert_tagger(torch.float32), "token_classification"),
        (models.tiny_vit, "image_classification"),
        (multimodal.wav2vec2, "audio_classification"),  # by name a classifier of sequences
        (multimodal.ast, "audio_classification"),
        (multimodal.llava, "image_text_to_text"),
        (multimodal.gemma3, "image_text_to_text"),  # it stands among the causal language models, too
    ],
)
def test_a_head_decides_the_task(make: Callable[[], nn.Module], task: str) -> None:
    assert task_of(make()).name == task
    with attach(make(), subspace="last_layer") as bayesian:
        assert type(bayesian) is MODELS[task]
        assert type(bayesian).__name__ == f"BayesianModel{TASKS[task].suffix}"
        assert bayesian.auto_class.__name__ == TASKS[task].auto_class


class OwnForSequenceClassification(BertForSequenceClassification):
    """A subclass is what its parent is, whatever its own name."""


class Tuned(LlamaForCausalLM):
    pass


class RemoteLMHeadModel(PreTrainedModel):
    config_class = BertConfig


class RemoteForTokenClassification(PreTrainedModel):
    config_class = BertConfig


def test_classes_from_elsewhere_go_by_parent_auto_map_or_name() -> None:
    assert task_of(OwnForSequenceClassification(BERT)).name == "sequence_classification"
    assert task_of(Tuned(models.tiny_llama().config)).name == "causal_lm"
    assert task_of(RemoteForTokenClassification(BertConfig())).name == "token_classification"
    with pytest.raises(ValueError, match="RemoteLMHeadModel is in none of the mappings"):
        task_of(RemoteLMHeadModel(BertConfig()))
    config = BertConfig(auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "modeling.RemoteLMHeadModel"})
    assert task_of(RemoteLMHeadModel(config)).name == "causal_lm"


def test_a_registered_class_is_what_it_was_registered_as() -> None:
    class OwnConfig(BertConfig):
        model_type = "own"

    class Own(PreTrainedModel):
        config_class = OwnConfig

    transformers.AutoModelForImageClassification.register(OwnConfig, Own)
    try:
        assert task_of(Own(OwnConfig())).name == "image_classification"
    finally:
        del transformers.AutoModelForImageClassification._model_mapping._extra_content[OwnConfig]


def test_an_encoder_as_a_language_model_must_be_a_decoder() -> None:
    config = BertConfig(**{**BERT.to_dict(), "is_decoder": False})
    with pytest.raises(ValueError, match=r"sees the tokens it predicts.*is_decoder=True"):
        attach(transformers.BertLMHeadModel(config), subspace="last_layer")
    config.is_decoder = True
    attach(transformers.BertLMHeadModel(config), subspace="last_block").detach()
