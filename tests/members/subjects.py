"""Models and subspaces on which folding is compared with separate models."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests import multimodal
from tests import tiny_models as models
from tests.members.subject_models import (
    albert,
    bamba,
    bart,
    bert,
    bert_tagger,
    bloom,
    convnext,
    deepseek_v3,
    distilbert,
    electra,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt2_classifier,
    gpt_oss,
    granite_hybrid,
    jamba,
    lfm2,
    llama,
    llama_classifier,
    llama_tagger,
    lora,
    mistral,
    mixtral,
    modernbert,
    mpt,
    named,
    opt,
    opt_projected,
    phi,
    qwen2,
    qwen2_classifier,
    qwen3,
    qwen3_moe,
    qwen3_next,
    resnet,
    roberta,
    vit,
)


class Subject(NamedTuple):
    """A model, its random parameters, and the side on which float64 batches are padded.

    ``rounds``: part of the model is float32 whatever its dtype (a router's product), so that folding it rounds anew.
    """

    make: Callable[[torch.dtype], nn.Module]
    subspace: str = "trainable"
    padding: str = "left"
    rounds: bool = False


CAUSAL = {
    "llama-lora": Subject(lora(llama())),
    "llama-lora-every-linear": Subject(lora(llama(), target_modules="all-linear")),
    "llama-lora-last-block": Subject(lora(llama(), target_modules=["q_proj", "v_proj"], layers_to_transform=[2])),
    "llama-lora-mlp-of-last-block": Subject(lora(llama(), target_modules=["down_proj"], layers_to_transform=[2])),
    "llama-lora-on-head": Subject(lora(llama(), target_modules=["lm_head"])),
    "llama-rslora": Subject(lora(llama(), use_rslora=True)),
    "llama-lora-and-saved-head": Subject(
        lora(llama(), target_modules=["q_proj", "o_proj"], layers_to_transform=[1, 2], modules_to_save=["lm_head"])
    ),
    "llama-head": Subject(llama(), "last_layer"),
    "llama-tied-head": Subject(llama(tie_word_embeddings=True), "last_layer"),
    "llama-last-block": Subject(llama(), "last_block"),
    "llama-norms": Subject(llama(), "norm"),
    "llama-final-norm": Subject(llama(), r"model\.norm\."),
    "llama-everything": Subject(llama(), "."),
    "llama-lora-and-its-base": Subject(lora(llama()), r"layers\.2\."),
    "gpt2-lora": Subject(lora(gpt2)),
    "gpt2-last-block": Subject(gpt2, "last_block"),
    "gpt2-tied-head": Subject(gpt2, "last_layer"),
    "gpt2-norms": Subject(gpt2, "ln_"),
    "gpt2-everything": Subject(gpt2, "."),
    "gemma-norms": Subject(gemma, "norm"),
    "gemma-everything": Subject(gemma, "."),
    "gemma2-last-block": Subject(gemma2, "last_block", padding="right"),
    "gemma2-everything": Subject(gemma2, ".", padding="right"),
    "gemma3-lora": Subject(lora(gemma3)),
    "gemma3-last-block": Subject(gemma3, "last_block"),
    "gemma3-everything": Subject(gemma3, "."),
    "lfm2-last-block": Subject(lfm2, "last_block"),
    "mistral-lora": Subject(lora(mistral)),
    "mistral-last-block": Subject(mistral, "last_block"),
    "qwen2-lora": Subject(lora(qwen2)),
    "qwen2-everything": Subject(qwen2, "."),
    "qwen3-query-and-key-norms": Subject(qwen3, r"[qk]_norm"),
    "qwen3-last-block": Subject(qwen3, "last_block"),
    "phi-head": Subject(phi, "last_layer"),
    "phi-everything": Subject(phi, "."),
    "jamba-lora": Subject(lora(jamba, target_modules=["q_proj", "v_proj"])),
    "bamba-lora": Subject(lora(bamba, target_modules=["q_proj", "v_proj"])),
    "granitemoehybrid-lora": Subject(lora(granite_hybrid, target_modules=["q_proj", "v_proj"])),
    "falcon_h1-lora": Subject(lora(falcon_h1, target_modules=["q_proj", "v_proj"])),
    "qwen3_next-lora": Subject(lora(qwen3_next, target_modules=["q_proj", "v_proj"])),
    "mixtral-lora": Subject(lora(mixtral, target_modules=["q_proj", "o_proj"])),
    "qwen3_moe-lora": Subject(lora(qwen3_moe, target_modules=["q_proj", "o_proj"])),
    "deepseek_v3-lora": Subject(lora(deepseek_v3, target_modules=["q_b_proj", "o_proj"]), rounds=True),
    "gpt_oss-lora": Subject(lora(gpt_oss, target_modules=["q_proj", "o_proj"])),
    # a bias of the smallest float64 number on a float32 softmax gives NaN, as in gemma2
    "bloom-last-block": Subject(bloom, "last_block", padding="right"),
    "mpt-last-block": Subject(mpt, "last_block", padding="right"),
    "falcon-lora": Subject(
        lora(named("Falcon", hidden_dropout=0.0, attention_dropout=0.0), target_modules=["query_key_value", "dense"])
    ),
    "gpt_neox-last-block": Subject(named("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0), "last_block"),
    "gptj-last-block": Subject(
        named("GPTJ", n_embd=16, n_layer=2, n_head=2, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "last_block",
    ),
    "phi3-last-block": Subject(named("Phi3"), "last_block"),
    "granite-last-block": Subject(named("Granite", logits_scaling=2.0, residual_multiplier=0.5), "last_block"),
    "olmo2-last-block": Subject(named("Olmo2"), "last_block"),
    "cohere2-last-block": Subject(named("Cohere2", sliding_window=4), "last_block"),
    "smollm3-last-block": Subject(named("SmolLM3"), "last_block"),
    "starcoder2-last-block": Subject(
        named("Starcoder2", sliding_window=4, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
        "last_block",
    ),
    "glm4-last-block": Subject(named("Glm4", head_dim=8), "last_block"),
    "opt-lora": Subject(lora(opt, target_modules=["q_proj", "v_proj"])),
    "opt-lora-on-mlp": Subject(lora(opt, target_modules=["fc1", "fc2"])),  # in this model tokens are rows
    "opt-last-block": Subject(opt_projected, "last_block"),
    "bart-lora": Subject(lora(bart, target_modules=r".*self_attn\.[qv]_proj")),
}

CLASSIFIERS = {
    "bert-lora": Subject(lora(bert)),
    "bert-lora-and-saved-head": Subject(lora(bert, layers_to_transform=[1], modules_to_save=["classifier"])),
    "bert-head": Subject(bert, "last_layer"),
    "bert-last-block": Subject(bert, "last_block"),
    "bert-everything": Subject(bert, "."),
    "roberta-head": Subject(roberta, "last_layer"),
    "roberta-lora": Subject(lora(roberta)),
    "roberta-everything": Subject(roberta, "."),
    "albert-head": Subject(albert(), "last_layer"),
    "albert-lora": Subject(lora(albert())),
    "albert-last-block": Subject(albert(groups=2), "last_block"),
    "albert-everything": Subject(albert(), "."),
    "distilbert-head": Subject(distilbert, "last_layer"),
    "distilbert-everything": Subject(distilbert, "."),
    "electra-last-block": Subject(electra, "last_block"),
    "gpt2-classifier-head": Subject(gpt2_classifier, "last_layer"),
    "qwen2-classifier-lora": Subject(lora(qwen2_classifier, target_modules=["q_proj", "v_proj"])),
    "modernbert-last-block": Subject(modernbert, "last_block"),
    "modernbert-everything": Subject(modernbert, "."),
    "llama-classifier-head": Subject(llama_classifier, "last_layer"),
    "llama-classifier-last-block": Subject(llama_classifier, "last_block"),
}

TAGGERS = {
    "bert-tagger-lora": Subject(lora(bert_tagger)),
    "bert-tagger-head": Subject(bert_tagger, "last_layer"),
    "bert-tagger-last-block": Subject(bert_tagger, "last_block"),
    "llama-tagger-head": Subject(llama_tagger, "last_layer"),
    "llama-tagger-last-block": Subject(llama_tagger, "last_block"),
}

IMAGES = {
    "vit-lora": Subject(lora(vit)),
    "vit-lora-and-saved-head": Subject(lora(vit, layers_to_transform=[1], modules_to_save=["classifier"])),
    "vit-head": Subject(vit, "last_layer"),
    "vit-last-block": Subject(vit, "last_block"),
    "vit-norms": Subject(vit, "layernorm"),
    "vit-patches": Subject(vit, r"patch_embeddings|classifier"),
    "resnet-head": Subject(resnet, "last_layer"),
    "resnet-convolutions": Subject(resnet, r"convolution"),  # batch normalisation is frozen
    "resnet-last-stage": Subject(resnet, r"stages\.1|classifier"),
    "resnet-everything": Subject(resnet, "."),
    "convnext-last-stage": Subject(convnext, r"stages\.1|classifier"),
    "convnext-everything": Subject(convnext, "."),
}

AUDIO = {
    "wav2vec2-lora": Subject(lora(multimodal.wav2vec2)),
    "wav2vec2-head": Subject(multimodal.wav2vec2, "last_layer"),
    "wav2vec2-last-block": Subject(multimodal.wav2vec2, "last_block"),
    "wav2vec2-convolutions": Subject(multimodal.wav2vec2, r"conv_layers\.\d\.conv\."),
    "ast-lora": Subject(lora(multimodal.ast)),
    "ast-head": Subject(multimodal.ast, "last_layer"),
}

IMAGES_AND_TEXT = {
    "llava-lora": Subject(lora(multimodal.llava)),  # in both parts
    "llava-head": Subject(multimodal.llava, "last_layer"),
    "llava-last-block": Subject(multimodal.llava, "last_block"),
    "llava-projector": Subject(multimodal.llava, "projector"),
    "gemma3-images-last-block": Subject(multimodal.gemma3, "last_block"),
    "idefics3-last-block": Subject(multimodal.idefics3, "last_block"),
    "qwen2_vl-lora": Subject(lora(multimodal.qwen2_vl)),
    "qwen2_vl-head": Subject(multimodal.qwen2_vl, "last_layer"),
}

SUBJECTS = CAUSAL | CLASSIFIERS | TAGGERS | IMAGES | AUDIO | IMAGES_AND_TEXT


def labelled(subject: str, rows: int = 3, padding: str | None = "right", seed: int = 0) -> dict[str, Tensor]:
    """Return a batch with labels: of tokens (padding and one more token are left out), or of classes."""
    if subject in IMAGES:
        return {**models.images(rows, seed, torch.float64), "labels": torch.arange(rows) % 3}
    family = subject.split("-")[0]
    if subject in AUDIO:
        return {**multimodal.sounds(family, rows, seed, torch.float64), "labels": torch.arange(rows) % 3}
    if subject in IMAGES_AND_TEXT:
        inputs = multimodal.illustrated(family, rows, seed, padding, dtype=torch.float64)
        labels = inputs["input_ids"].masked_fill(inputs["input_ids"] <= multimodal.IMAGE, -100)
        return {**inputs, "labels": labels.scatter_(1, inputs["attention_mask"].argmax(1, keepdim=True), -100)}
    inputs = models.batch(rows, seed=seed, padding=padding)
    if subject in CLASSIFIERS:
        return {**inputs, "labels": torch.arange(rows) % 3}
    labels = inputs["input_ids"] % 3 if subject in TAGGERS else inputs["input_ids"]
    labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[0, 4] = -100
    if subject in CAUSAL:  # padding predicts no token here; transformers' own loss counts the first one on its right
        labels.scatter_(1, inputs["attention_mask"].argmax(1, keepdim=True), -100)
    return {**inputs, "labels": labels}
