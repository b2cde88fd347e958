"""Models without a trunk: they use something of M * B rows beside their blocks, or their rows are not first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.prediction.inputs import member_outputs
from tests import tiny_models as models
from tests.members.reference import relative_error, scattered
from tests.tiny_models import VOCABULARY, batch

TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "num_labels": 3}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "DebertaV2": {**TEXT, "relative_attention": True, "pos_att_type": ["c2p"], "conv_kernel_size": 3,
                  "conv_act": "gelu"},
    "Longformer": {**TEXT, "attention_window": 4},
    "Xmod": {**TEXT, "languages": ["a", "b"], "default_language": "a"},
    "PvtV2": {"image_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4,
              "num_labels": 3},
    "WavLM": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
              "conv_dim": [8], "conv_kernel": [5], "conv_stride": [4], "num_feat_extract_layers": 1,
              "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
              "classifier_proj_size": 8},
    "Gemma3n": {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size": 16,
                "hidden_size_per_layer_input": 8, "intermediate_size": 24, "num_hidden_layers": 4,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_kv_shared_layers": 0,
                "laurel_rank": 4, "layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4,
                "pad_token_id": 0},
}  # fmt: skip


HEADS = {"PvtV2": "ForImageClassification", "Gemma3n": "ForCausalLM"}
CONFIGS = {"Gemma3n": "Gemma3nTextConfig"}


def tiny(family: str) -> nn.Module:
    head = HEADS.get(family, "ForSequenceClassification")
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**FAMILIES[family])
    return models._build(lambda: getattr(transformers, family + head)(config), 0, torch.float64).eval()


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    match family:
        case "PvtV2":
            return {"pixel_values": torch.randn(4, 3, 32, 32, dtype=torch.float64)}
        case "WavLM":
            return {"input_values": torch.randn(4, 60, dtype=torch.float64)}
    return batch(4)


@pytest.mark.parametrize(
    ("family", "subspace", "num_blocks"),
    [(family, "last_layer", 0) for family in FAMILIES if family not in ("WavLM", "Gemma3n")]
    + [("WavLM", "last_layer", 3), ("WavLM", r"layers\.2\.feed_forward", 0)]
    + [("Gemma3n", r"layers\.3\.self_attn\.[qvo]_proj", 0)],
)
def test_members_equal_separate_models(family: str, subspace: str, num_blocks: int) -> None:
    model, inputs = tiny(family), inputs_of(family)
    layout = select(model, subspace)
    theta = scattered(model, layout)
    expected = []
    for row in theta:
        with torch.no_grad(), attach(model, row[None], subspace=subspace) as single:
            expected.append(member_outputs(single, inputs))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        assert bayesian.members.num_trunk_blocks == num_blocks
        found = member_outputs(bayesian, inputs)
    assert relative_error(found, torch.cat(expected)) < 1e-13
