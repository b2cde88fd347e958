"""Models and subspaces on which folding is compared with separate models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertForTokenClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
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
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests import multimodal
from tests import tiny_models as models
from tests.tiny_models import PAD, VOCABULARY, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora


class Subject(NamedTuple):
    """A model, its random parameters, and the side on which float64 batches are padded.

    ``rounds``: part of the model is float32 whatever its dtype (a router's product), so that folding it rounds anew.
    """

    make: Callable[[torch.dtype], nn.Module]
    subspace: str = "trainable"
    padding: str = "left"
    rounds: bool = False


def _small(config: type, model: type, dtype: torch.dtype, **fields: Any) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return models._build(lambda: model(config(**(sizes | fields))), 0, dtype)


def _named(family: str, head: str = "ForCausalLM", **fields: Any) -> Callable[[torch.dtype], nn.Module]:
    """Build the model from the names of its classes. Experts run one by one: their fused kernel has no float64."""

    def make(dtype: torch.dtype) -> nn.Module:
        model = _small(getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}{head}"), dtype,
                       **fields)  # fmt: skip
        if any(name.endswith(".experts") for name, _ in model.named_modules()):
            model.set_experts_implementation("eager")
        return model

    return make


def gemma(dtype: torch.dtype) -> nn.Module:
    """A model with an RMSNorm that multiplies by 1 + weight, and a tied head."""
    return _small(GemmaConfig, GemmaForCausalLM, dtype, head_dim=8)


def gemma2(dtype: torch.dtype) -> nn.Module:
    """A model with alternating sliding and full attention, and with capped logits and attention scores.

    The softmax is computed in float32, where a float64 mask overflows: padding on the left gives NaN in transformers.
    """
    return _small(Gemma2Config, Gemma2ForCausalLM, dtype, head_dim=8, sliding_window=4, final_logit_softcapping=2.0)


def gemma3(dtype: torch.dtype) -> nn.Module:
    """A model with a full layer among sliding layers, different rotary angles for each kind, and norms on q and k."""
    return _small(
        Gemma3TextConfig, Gemma3ForCausalLM, dtype, head_dim=8, sliding_window=4, num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip


def lfm2(dtype: torch.dtype) -> nn.Module:
    """A model with a convolution below full attention; the cache of the convolution is a state without keys."""
    return _small(Lfm2Config, Lfm2ForCausalLM, dtype, layer_types=["conv", "full_attention"])


def mistral(dtype: torch.dtype) -> nn.Module:
    """A model with sliding attention in all layers and a window shorter than a prompt."""
    return _small(MistralConfig, MistralForCausalLM, dtype, head_dim=8, sliding_window=4, num_hidden_layers=3)


def qwen2(dtype: torch.dtype) -> nn.Module:
    """A model with biases on queries, keys and values only, and sliding attention in the upper layers."""
    return _small(
        Qwen2Config, Qwen2ForCausalLM, dtype, num_hidden_layers=3, use_sliding_window=True, sliding_window=4,
        max_window_layers=1,
    )  # fmt: skip


def qwen3(dtype: torch.dtype) -> nn.Module:
    """A model with an RMSNorm per head on queries and keys, which have four dimensions."""
    return _small(Qwen3Config, Qwen3ForCausalLM, dtype, head_dim=8)


def phi(dtype: torch.dtype) -> nn.Module:
    """A model with LayerNorm, a head with bias, and attention and MLP in parallel."""
    return _small(PhiConfig, PhiForCausalLM, dtype, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)


def roberta(dtype: torch.dtype) -> nn.Module:
    """A model with positions counted from the padding, and a head of two layers."""
    return _small(
        RobertaConfig, RobertaForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def modernbert(dtype: torch.dtype) -> nn.Module:
    """A model with alternating sliding and full attention, and a head after pooling."""
    return _small(
        ModernBertConfig, ModernBertForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None,
        cls_token_id=1, sep_token_id=2, local_attention=4, reference_compile=False,
    )  # fmt: skip


def _albert(groups: int = 1) -> Callable[[torch.dtype], nn.Module]:
    """A model with four layers that share blocks, so a block runs several times in a forward."""
    return lambda dtype: _small(
        AlbertConfig, AlbertForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None, embedding_size=8,
        num_hidden_layers=4, num_hidden_groups=groups, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


_STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

# Layers with states, whose cache has no keys, among attention layers
jamba = _named("Jamba", num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1,
               use_mamba_kernels=False)  # fmt: skip
bamba = _named("Bamba", attn_layer_indices=[1], **_STATES)
granite_hybrid = _named("GraniteMoeHybrid", layer_types=["mamba", "attention"], num_local_experts=0,
                        shared_intermediate_size=16, **_STATES)  # fmt: skip
falcon_h1 = _named("FalconH1", mamba_d_ssm=32, **_STATES)
qwen3_next = _named(
    "Qwen3Next", num_experts=4, shared_expert_intermediate_size=8, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], **_EXPERTS,
)  # fmt: skip

# Experts between attention layers
mixtral = _named("Mixtral", num_local_experts=4)
qwen3_moe = _named("Qwen3Moe", num_experts=4, head_dim=8, decoder_sparse_step=1, **_EXPERTS)
deepseek_v3 = _named(
    "DeepseekV3", n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, **_EXPERTS,
)  # fmt: skip
gpt_oss = _named("GptOss", num_local_experts=2, num_experts_per_tok=2, head_dim=8, sliding_window=4,
                 layer_types=["sliding_attention", "full_attention"])  # fmt: skip

# Positions by biases on attention: [rows * heads, ...] in Bloom, [heads, ...] in MPT
bloom = _named("Bloom", n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
mpt = _named("Mpt", d_model=16, n_heads=2, n_layers=2)

# Their heads call the decoder of the backbone, and not the backbone
opt = _named("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)
opt_projected = _named("OPT", ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False, dropout=0.0)
bart = _named("Bart", d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, dropout=0.0)

gpt2_classifier = _named("GPT2", "ForSequenceClassification", n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                         embd_pdrop=0.0, attn_pdrop=0.0, num_labels=3)  # fmt: skip
qwen2_classifier = _named("Qwen2", "ForSequenceClassification", num_labels=3)
distilbert = _named("DistilBert", "ForSequenceClassification", dim=16, hidden_dim=24, n_layers=2, n_heads=2,
                    dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3)  # fmt: skip
electra = _named("Electra", "ForSequenceClassification", embedding_size=8, num_labels=3, hidden_dropout_prob=0.0,
                 attention_probs_dropout_prob=0.0, num_key_value_heads=None)  # fmt: skip


def llama_classifier(dtype: torch.dtype) -> nn.Module:
    """A classifier that reads the last token that is not padding."""
    config = tiny_llama().config
    config.num_labels = 3
    return models._build(lambda: LlamaForSequenceClassification(config), 0, dtype)


def bert_tagger(dtype: torch.dtype) -> nn.Module:
    """A classifier of tokens."""
    config = tiny_bert().config
    return models._build(lambda: BertForTokenClassification(config), 0, dtype)


def llama_tagger(dtype: torch.dtype) -> nn.Module:
    """A causal backbone whose labels are not shifted."""
    config = tiny_llama().config
    config.num_labels = 3
    return models._build(lambda: LlamaForTokenClassification(config), 0, dtype)


def resnet(dtype: torch.dtype, **config: Any) -> nn.Module:
    """Two stages of one block each, with batch normalisation."""
    fields: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic",
                              "num_labels": 3}  # fmt: skip
    return models._build(lambda: ResNetForImageClassification(ResNetConfig(**(fields | config))), 0, dtype)


def convnext(dtype: torch.dtype) -> nn.Module:
    """Depthwise convolutions, and norms over channels that come first; without scales of layers, bare parameters."""
    config = ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, patch_size=2, layer_scale_init_value=0.0,
                            num_labels=3)  # fmt: skip
    return models._build(lambda: ConvNextForImageClassification(config), 0, dtype)


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
    "jamba-lora": Subject(_lora(jamba, target_modules=["q_proj", "v_proj"])),
    "bamba-lora": Subject(_lora(bamba, target_modules=["q_proj", "v_proj"])),
    "granitemoehybrid-lora": Subject(_lora(granite_hybrid, target_modules=["q_proj", "v_proj"])),
    "falcon_h1-lora": Subject(_lora(falcon_h1, target_modules=["q_proj", "v_proj"])),
    "qwen3_next-lora": Subject(_lora(qwen3_next, target_modules=["q_proj", "v_proj"])),
    "mixtral-lora": Subject(_lora(mixtral, target_modules=["q_proj", "o_proj"])),
    "qwen3_moe-lora": Subject(_lora(qwen3_moe, target_modules=["q_proj", "o_proj"])),
    "deepseek_v3-lora": Subject(_lora(deepseek_v3, target_modules=["q_b_proj", "o_proj"]), rounds=True),
    "gpt_oss-lora": Subject(_lora(gpt_oss, target_modules=["q_proj", "o_proj"])),
    # a bias of the smallest float64 number on a float32 softmax gives NaN, as in gemma2
    "bloom-last-block": Subject(bloom, "last_block", padding="right"),
    "mpt-last-block": Subject(mpt, "last_block", padding="right"),
    "falcon-lora": Subject(
        _lora(_named("Falcon", hidden_dropout=0.0, attention_dropout=0.0), target_modules=["query_key_value", "dense"])
    ),
    "gpt_neox-last-block": Subject(_named("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0), "last_block"),
    "gptj-last-block": Subject(
        _named("GPTJ", n_embd=16, n_layer=2, n_head=2, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "last_block",
    ),
    "phi3-last-block": Subject(_named("Phi3"), "last_block"),
    "granite-last-block": Subject(_named("Granite", logits_scaling=2.0, residual_multiplier=0.5), "last_block"),
    "olmo2-last-block": Subject(_named("Olmo2"), "last_block"),
    "cohere2-last-block": Subject(_named("Cohere2", sliding_window=4), "last_block"),
    "smollm3-last-block": Subject(_named("SmolLM3"), "last_block"),
    "starcoder2-last-block": Subject(
        _named("Starcoder2", sliding_window=4, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
        "last_block",
    ),
    "glm4-last-block": Subject(_named("Glm4", head_dim=8), "last_block"),
    "opt-lora": Subject(_lora(opt, target_modules=["q_proj", "v_proj"])),
    "opt-lora-on-mlp": Subject(_lora(opt, target_modules=["fc1", "fc2"])),  # in this model tokens are rows
    "opt-last-block": Subject(opt_projected, "last_block"),
    "bart-lora": Subject(_lora(bart, target_modules=r".*self_attn\.[qv]_proj")),
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
    "distilbert-head": Subject(distilbert, "last_layer"),
    "distilbert-everything": Subject(distilbert, "."),
    "electra-last-block": Subject(electra, "last_block"),
    "gpt2-classifier-head": Subject(gpt2_classifier, "last_layer"),
    "qwen2-classifier-lora": Subject(_lora(qwen2_classifier, target_modules=["q_proj", "v_proj"])),
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
    "vit-patches": Subject(_vit, r"patch_embeddings|classifier"),
    "resnet-head": Subject(resnet, "last_layer"),
    "resnet-convolutions": Subject(resnet, r"convolution"),  # batch normalisation is frozen
    "resnet-last-stage": Subject(resnet, r"stages\.1|classifier"),
    "resnet-everything": Subject(resnet, "."),
    "convnext-last-stage": Subject(convnext, r"stages\.1|classifier"),
    "convnext-everything": Subject(convnext, "."),
}

AUDIO = {
    "wav2vec2-lora": Subject(_lora(multimodal.wav2vec2)),
    "wav2vec2-head": Subject(multimodal.wav2vec2, "last_layer"),
    "wav2vec2-last-block": Subject(multimodal.wav2vec2, "last_block"),
    "wav2vec2-convolutions": Subject(multimodal.wav2vec2, r"conv_layers\.\d\.conv\."),
    "ast-lora": Subject(_lora(multimodal.ast)),
    "ast-head": Subject(multimodal.ast, "last_layer"),
}

IMAGES_AND_TEXT = {
    "llava-lora": Subject(_lora(multimodal.llava)),  # in both parts
    "llava-head": Subject(multimodal.llava, "last_layer"),
    "llava-last-block": Subject(multimodal.llava, "last_block"),
    "llava-projector": Subject(multimodal.llava, "projector"),
    "gemma3-images-last-block": Subject(multimodal.gemma3, "last_block"),
    "idefics3-last-block": Subject(multimodal.idefics3, "last_block"),
    "qwen2_vl-lora": Subject(_lora(multimodal.qwen2_vl)),
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
