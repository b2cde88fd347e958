"""Tiny models that read images beside text, or audio, with inputs for them; built from a config, weights seeded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Lfm2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from tests import tiny_models as models
from tests.tiny_models import BOS, EOS, PAD, VOCABULARY

IMAGE = 3
"""The id of the placeholder; the rows of ``batch`` hold no other 3."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD,
    "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
PLACEHOLDERS = {"llava": 4, "gemma3": 4, "idefics3": 1, "qwen2_vl": 1}
"""Tokens that stand for an image, by type of model."""


def llava(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with more blocks in the part that reads images than in the part that writes."""
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT),
                         image_token_id=IMAGE, vision_feature_layer=-1)  # fmt: skip
    return models._build(lambda: LlavaForConditionalGeneration(config), 0, dtype)


def llava_next(dtype: torch.dtype = torch.float32) -> nn.Module:
    """An image is a small whole and crops, and has a token after each of its lines."""
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**{**TEXT, "max_position_embeddings": 128}),
        image_token_id=IMAGE, vision_feature_layer=-1, image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
    )  # fmt: skip
    return models._build(lambda: LlavaNextForConditionalGeneration(config), 0, dtype)


def llava_lfm2(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A convolution in the part that writes: the caches of several passes have no join."""
    text = Lfm2Config(**TEXT, layer_types=["conv", "full_attention"])
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_id=IMAGE,
                         vision_feature_layer=-1)  # fmt: skip
    return models._build(lambda: LlavaForConditionalGeneration(config), 0, dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> nn.Module:
    """An image's tokens see each other; one layer slides."""
    text = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(vision_config=SiglipVisionConfig(**VISION), text_config=text, image_token_id=IMAGE,
                          mm_tokens_per_image=4, boi_token_id=4, eoi_token_id=5)  # fmt: skip
    return models._build(lambda: Gemma3ForConditionalGeneration(config), 0, dtype)


def idefics3(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Images as [rows, images, ...]."""
    config = Idefics3Config(vision_config=dict(VISION), text_config=LlamaConfig(**TEXT), image_token_id=IMAGE,
                            scale_factor=2)  # fmt: skip
    return models._build(lambda: Idefics3ForConditionalGeneration(config), 0, dtype)


def qwen2_vl(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Patches of all images one after the other, positions on three axes."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 3, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "mlp_ratio": 2}  # fmt: skip
    config = Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope}, image_token_id=IMAGE,
                           video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)  # fmt: skip
    return models._build(lambda: Qwen2VLForConditionalGeneration(config), 0, dtype)


def illustrated(model_type: str, rows: int = 3, seed: int = 0, padding: str | None = None, length: int = 9,
                dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:  # fmt: skip
    """A ``batch`` whose row b has an image after its first token that is not padding."""
    inputs = models.batch(rows, length, seed, padding)
    ids, mask, count = inputs["input_ids"], inputs["attention_mask"], PLACEHOLDERS[model_type]
    ids[ids == IMAGE] = 7
    for row in range(rows):
        start = int(mask[row].argmax()) + 1
        ids[row, start : start + count] = IMAGE
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((rows, 3, 8, 8), generator=generator, dtype=torch.float64).to(dtype)
    types = (ids == IMAGE).long()
    if model_type == "qwen2_vl":
        patches = torch.randn((rows * 4, 3 * 2 * 16), generator=generator, dtype=torch.float64).to(dtype)
        grid = torch.tensor([[1, 2, 2]] * rows)
        return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}
    if model_type == "gemma3":
        return {**inputs, "pixel_values": pixels, "token_type_ids": types}
    return {**inputs, "pixel_values": pixels[:, None] if model_type == "idefics3" else pixels}


def wav2vec2(dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """Three convolutions, of 40 samples 9 frames, below two blocks; no dropout, no masks."""
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout",
                         "final_dropout", "layerdrop", "mask_time_prob"), 0.0)  # fmt: skip
    fields = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "conv_dim": (8, 8, 8), "conv_stride": (2, 2, 1), "conv_kernel": (3, 3, 1), "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 3, "vocab_size": 32, **off,
    }  # fmt: skip
    return models._build(lambda: Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**(fields | config))), 0, dtype)


def ast(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Patches of a spectrogram, no dropout."""
    config = ASTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
                       frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8, num_labels=3,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return models._build(lambda: ASTForAudioClassification(config), 0, dtype)


def sounds(model_type: str, rows: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random ``input_values``: samples [rows, 40] for ``wav2vec2``, spectrograms [rows, 16, 8] for ``ast``."""
    shape = (rows, 40) if model_type == "wav2vec2" else (rows, 16, 8)
    generator = torch.Generator().manual_seed(seed)
    return {"input_values": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)}


def inputs_of(core: Any, rows: int = 3, seed: int = 0, padding: str | None = None) -> dict[str, Tensor]:
    """Return the inputs of one of these models, in its dtype."""
    kind, dtype = core.config.model_type, next(core.parameters()).dtype
    if kind in PLACEHOLDERS:
        return illustrated(kind, rows, seed, padding, dtype=dtype)
    return sounds(kind, rows, seed, dtype)


MODEL_TYPES = (*PLACEHOLDERS, "wav2vec2", "audio-spectrogram-transformer")
