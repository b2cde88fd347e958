"""Models and subspaces on which folding is compared with separate models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests import models
from tests.models import PAD, VOCABULARY, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora


class Subject(NamedTuple):
    """A model, what is random in it, and the side on which float64 batches are padded."""

    make: Callable[[torch.dtype], nn.Module]
    subspace: str = "trainable"
    padding: str = "left"


def _small(config: type, model: type, dtype: torch.dtype, **fields: Any) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return models._build(lambda: model(config(**(sizes | fields))), 0, dtype)


def gemma(dtype: torch.dtype) -> nn.Module:
    """RMSNorm by 1 + weight, tied head."""
    return _small(GemmaConfig, GemmaForCausalLM, dtype, head_dim=8)


def gemma2(dtype: torch.dtype) -> nn.Module:
    """Sliding and full attention in turn, logits capped at 2 after the head, attention capped before its softmax.

    That softmax is taken in float32, where a float64 mask overflows: transformers answers NaN to padding on the left.
    """
    return _small(Gemma2Config, Gemma2ForCausalLM, dtype, head_dim=8, sliding_window=4, final_logit_softcapping=2.0)


def gemma3(dtype: torch.dtype) -> nn.Module:
    """A full layer among sliding ones, each kind with rotary angles of its own; norms on queries and keys."""
    return _small(
        Gemma3TextConfig, Gemma3ForCausalLM, dtype, head_dim=8, sliding_window=4, num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip


def lfm2(dtype: torch.dtype) -> nn.Module:
    """A convolution, whose cache is a state and no keys, below full attention."""
    return _small(Lfm2Config, Lfm2ForCausalLM, dtype, layer_types=["conv", "full_attention"])


def mistral(dtype: torch.dtype) -> nn.Module:
    """Sliding attention everywhere, the window shorter than a prompt."""
    return _small(MistralConfig, MistralForCausalLM, dtype, head_dim=8, sliding_window=4, num_hidden_layers=3)


def qwen2(dtype: torch.dtype) -> nn.Module:
    """Biases on queries, keys and values alone; the upper layers slide."""
    return _small(
        Qwen2Config, Qwen2ForCausalLM, dtype, num_hidden_layers=3, use_sliding_window=True, sliding_window=4,
        max_window_layers=1,
    )  # fmt: skip


def qwen3(dtype: torch.dtype) -> nn.Module:
    """RMSNorm per head on queries and keys: four dimensions."""
    return _small(Qwen3Config, Qwen3ForCausalLM, dtype, head_dim=8)


def phi(dtype: torch.dtype) -> nn.Module:
    """LayerNorm, a head with bias, attention and MLP in parallel."""
    return _small(PhiConfig, PhiForCausalLM, dtype, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)


def roberta(dtype: torch.dtype) -> nn.Module:
    """Positions counted from the padding, a head of two layers."""
    return _small(
        RobertaConfig, RobertaForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def modernbert(dtype: torch.dtype) -> nn.Module:
    """Sliding and full attention in turn, a head after pooling."""
    return _small(
        ModernBertConfig, ModernBertForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None,
        cls_token_id=1, sep_token_id=2, local_attention=4, reference_compile=False,
    )  # fmt: skip


def _albert(groups: int = 1) -> Callable[[torch.dtype], nn.Module]:
    """Four layers made of fewer: a block runs several times in a forward."""
    return lambda dtype: _small(
        AlbertConfig, AlbertForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None, embedding_size=8,
        num_hidden_layers=4, num_hidden_groups=groups, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def llama_classifier(dtype: torch.dtype) -> nn.Module:
    """Reads its answer at the last token that is not padding."""
    config = tiny_llama().config
    config.num_labels = 3
    return models._build(lambda: LlamaForSequenceClassification(config), 0, dtype)


def bert_tagger(dtype: torch.dtype) -> nn.Module:
    """A class for every token."""
    config = tiny_bert().config
    return models._build(lambda: BertForTokenClassification(config), 0, dtype)


def llama_tagger(dtype: torch.dtype) -> nn.Module:
    """A causal backbone whose labels are not shifted."""
    config = tiny_llama().config
    config.num_labels = 3
    return models._build(lambda: LlamaForTokenClassification(config), 0, dtype)


def _vit(dtype: torch.dtype) -> nn.Module:
    return tiny_vit(dtype=dtype)


def _llama(**config: Any) -> Callable[[torch.dtype], nn.Module]:
    return lambda dtype: tiny_llama(dtype=dtype, num_hidden_layers=3, **config)


def _lora(make: Callable[[torch.dtype], nn.Module], **config: Any) -> Callable[[torch.dtype], nn.Module]:
    return lambda dtype: with_lora(make(dtype), **config)


def _gpt2(dtype: torch.dtype) -> nn.Module:
    return tiny_gpt2(dtype=dtype)


def _bert(dtype: torch.dtype) -> nn.Module:
    return tiny_bert(dtype=dtype)


CAUSAL = {
    "llama-lora": Subject(_lora(_llama())),
    "llama-lora-every-linear": Subject(_lora(_llama(), target_modules="all-linear")),
    "llama-lora-last-block": Subject(_lora(_llama(), target_modules=["q_proj", "v_proj"], layers_to_transform=[2])),
    "llama-lora-mlp-of-last-block": Subject(_lora(_llama(), target_modules=["down_proj"], layers_to_transform=[2])),
    "llama-lora-on-head": Subject(_lora(_llama(), target_modules=["lm_head"])),
    "llama-rslora": Subject(_lora(_llama(), use_rslora=True)),
    "llama-lora-and-saved-head": Subject(
        _lora(_llama(), target_modules=["q_proj", "o_proj"], layers_to_transform=[1, 2], modules_to_save=["lm_head"])
    ),
    "llama-head": Subject(_llama(), "last_layer"),
    "llama-tied-head": Subject(_llama(tie_word_embeddings=True), "last_layer"),
    "llama-last-block": Subject(_llama(), "last_block"),
    "llama-norms": Subject(_llama(), "norm"),
    "llama-final-norm": Subject(_llama(), r"model\.norm\."),
    "llama-everything": Subject(_llama(), "."),
    "llama-lora-and-its-base": Subject(_lora(_llama()), r"layers\.2\."),
    "gpt2-lora": Subject(_lora(_gpt2)),
    "gpt2-last-block": Subject(_gpt2, "last_block"),
    "gpt2-tied-head": Subject(_gpt2, "last_layer"),
    "gpt2-norms": Subject(_gpt2, "ln_"),
    "gpt2-everything": Subject(_gpt2, "."),
    "gemma-norms": Subject(gemma, "norm"),
    "gemma-everything": Subject(gemma, "."),
    "gemma2-last-block": Subject(gemma2, "last_block", padding="right"),
    "gemma2-everything": Subject(gemma2, ".", padding="right"),
    "gemma3-lora": Subject(_lora(gemma3)),
    "gemma3-last-block": Subject(gemma3, "last_block"),
    "gemma3-everything": Subject(gemma3, "."),
    "lfm2-last-block": Subject(lfm2, "last_block"),
    "mistral-lora": Subject(_lora(mistral)),
    "mistral-last-block": Subject(mistral, "last_block"),
    "qwen2-lora": Subject(_lora(qwen2)),
    "qwen2-everything": Subject(qwen2, "."),
    "qwen3-query-and-key-norms": Subject(qwen3, r"[qk]_norm"),
    "qwen3-last-block": Subject(qwen3, "last_block"),
    "phi-head": Subject(phi, "last_layer"),
    "phi-everything": Subject(phi, "."),
}

CLASSIFIERS = {
    "bert-lora": Subject(_lora(_bert)),
    "bert-lora-and-saved-head": Subject(_lora(_bert, layers_to_transform=[1], modules_to_save=["classifier"])),
    "bert-head": Subject(_bert, "last_layer"),
    "bert-last-block": Subject(_bert, "last_block"),
    "bert-everything": Subject(_bert, "."),
    "roberta-head": Subject(roberta, "last_layer"),
    "roberta-lora": Subject(_lora(roberta)),
    "roberta-everything": Subject(roberta, "."),
    "albert-head": Subject(_albert(), "last_layer"),
    "albert-lora": Subject(_lora(_albert())),
    "albert-last-block": Subject(_albert(groups=2), "last_block"),
    "albert-everything": Subject(_albert(), "."),
    "modernbert-last-block": Subject(modernbert, "last_block"),
    "modernbert-everything": Subject(modernbert, "."),
    "llama-classifier-head": Subject(llama_classifier, "last_layer"),
    "llama-classifier-last-block": Subject(llama_classifier, "last_block"),
}

TAGGERS = {
    "bert-tagger-lora": Subject(_lora(bert_tagger)),
    "bert-tagger-head": Subject(bert_tagger, "last_layer"),
    "bert-tagger-last-block": Subject(bert_tagger, "last_block"),
    "llama-tagger-head": Subject(llama_tagger, "last_layer"),
    "llama-tagger-last-block": Subject(llama_tagger, "last_block"),
}

IMAGES = {
    "vit-lora": Subject(_lora(_vit)),
    "vit-lora-and-saved-head": Subject(_lora(_vit, layers_to_transform=[1], modules_to_save=["classifier"])),
    "vit-head": Subject(_vit, "last_layer"),
    "vit-last-block": Subject(_vit, "last_block"),
    "vit-norms": Subject(_vit, "layernorm"),
}

SUBJECTS = CAUSAL | CLASSIFIERS | TAGGERS | IMAGES


def labelled(subject: str, rows: int = 3, padding: str | None = "right", seed: int = 0) -> dict[str, Tensor]:
    """A batch with labels: of tokens, padding and one more token left out, or of classes."""
    if subject in IMAGES:
        return {**models.images(rows, seed, torch.float64), "labels": torch.arange(rows) % 3}
    inputs = models.batch(rows, seed=seed, padding=padding)
    if subject in CLASSIFIERS:
        return {**inputs, "labels": torch.arange(rows) % 3}
    labels = inputs["input_ids"] % 3 if subject in TAGGERS else inputs["input_ids"]
    labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[0, 4] = -100
    return {**inputs, "labels": labels}
