"""The small models of ``subjects``, each by its architecture: dtype -> model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
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

from tests import tiny_models as models
from tests.tiny_models import PAD, VOCABULARY, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora


def _small(config: type, model: type, dtype: torch.dtype, **fields: Any) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return models._build(lambda: model(config(**(sizes | fields))), 0, dtype)


def named(family: str, head: str = "ForCausalLM", **fields: Any) -> Callable[[torch.dtype], nn.Module]:
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


def albert(groups: int = 1) -> Callable[[torch.dtype], nn.Module]:
    """A model with four layers that share blocks, so a block runs several times in a forward."""
    return lambda dtype: _small(
        AlbertConfig, AlbertForSequenceClassification, dtype, num_labels=3, num_key_value_heads=None, embedding_size=8,
        num_hidden_layers=4, num_hidden_groups=groups, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


_STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

# Layers with states, whose cache has no keys, among attention layers
jamba = named("Jamba", num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1,
               use_mamba_kernels=False)  # fmt: skip
bamba = named("Bamba", attn_layer_indices=[1], **_STATES)
granite_hybrid = named("GraniteMoeHybrid", layer_types=["mamba", "attention"], num_local_experts=0,
                        shared_intermediate_size=16, **_STATES)  # fmt: skip
falcon_h1 = named("FalconH1", mamba_d_ssm=32, **_STATES)
qwen3_next = named(
    "Qwen3Next", num_experts=4, shared_expert_intermediate_size=8, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], **_EXPERTS,
)  # fmt: skip

# Layers with states alone
mamba, falcon_mamba = (named(family, state_size=4) for family in ("Mamba", "FalconMamba"))
mamba2 = named("Mamba2", state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4)
xlstm = named("xLSTM", num_heads=2, chunk_size=4)

# Experts between attention layers
mixtral = named("Mixtral", num_local_experts=4)
qwen3_moe = named("Qwen3Moe", num_experts=4, head_dim=8, decoder_sparse_step=1, **_EXPERTS)
deepseek_v3 = named(
    "DeepseekV3", n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, **_EXPERTS,
)  # fmt: skip
gpt_oss = named("GptOss", num_local_experts=2, num_experts_per_tok=2, head_dim=8, sliding_window=4,
                 layer_types=["sliding_attention", "full_attention"])  # fmt: skip

# Positions by biases on attention: [rows * heads, ...] in Bloom, [heads, ...] in MPT
bloom = named("Bloom", n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
mpt = named("Mpt", d_model=16, n_heads=2, n_layers=2)

# Their heads call the decoder of the backbone, and not the backbone
opt = named("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)
opt_projected = named("OPT", ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False, dropout=0.0)
bart = named("Bart", d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, dropout=0.0)

gpt2_classifier = named("GPT2", "ForSequenceClassification", n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                         embd_pdrop=0.0, attn_pdrop=0.0, num_labels=3)  # fmt: skip
qwen2_classifier = named("Qwen2", "ForSequenceClassification", num_labels=3)
distilbert = named("DistilBert", "ForSequenceClassification", dim=16, hidden_dim=24, n_layers=2, n_heads=2,
                    dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3)  # fmt: skip
electra = named("Electra", "ForSequenceClassification", embedding_size=8, num_labels=3, hidden_dropout_prob=0.0,
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


def vit(dtype: torch.dtype) -> nn.Module:
    return tiny_vit(dtype=dtype)


def llama(**config: Any) -> Callable[[torch.dtype], nn.Module]:
    return lambda dtype: tiny_llama(dtype=dtype, num_hidden_layers=3, **config)


def lora(make: Callable[[torch.dtype], nn.Module], **config: Any) -> Callable[[torch.dtype], nn.Module]:
    return lambda dtype: with_lora(make(dtype), **config)


def gpt2(dtype: torch.dtype) -> nn.Module:
    return tiny_gpt2(dtype=dtype)


def bert(dtype: torch.dtype) -> nn.Module:
    return tiny_bert(dtype=dtype)
