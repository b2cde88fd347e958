"""Tests of the settings of a configuration by which base models differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.loading.config_fingerprint import evaluation_fields
from tests.runs import trainer
from tests.tiny_models import tiny_gpt2, with_lora


@pytest.mark.parametrize(
    "field",
    [
        "attention_dropout", "resid_pdrop", "classifier_dropout", "hidden_dropout_prob", "layerdrop", "drop_path_rate",
        "drop_rate", "attn_drop_rate", "fusion_droppath", "router_jitter_noise", "router_aux_loss_coef",
        "mask_time_prob", "gradient_checkpointing", "initializer_range", "init_std", "use_cache", "return_dict",
        "output_attentions", "output_hidden_states", "id2label", "pad_token_id",
    ],
)  # fmt: skip
def test_a_field_that_evaluation_cannot_depend_on_is_left_out(field: str) -> None:
    for config in ({field: 0.5}, {field: None}, {"text_config": {field: 1}}):
        assert evaluation_fields(config) in ({}, {"text_config": {}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_dropout", True), ("rope_theta", 5.0), ("hidden_act", "gelu"), ("layer_scale_init_value", 0.1),
        ("gradient_clipping", 10.0), ("drop_vision_last_layer", True), ("norm_topk_prob", True), ("new_field", 1),
        ("attention_bias", False), ("sliding_window", None),
    ],
)  # fmt: skip
def test_a_field_that_may_change_the_answer_is_kept(field: str, value: Any) -> None:
    assert evaluation_fields({field: value, "nested": {field: value}}) == {field: value, "nested": {field: value}}


def test_a_run_with_another_dropout_than_its_base_is_loaded(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_pdrop=0.1, resid_pdrop=0.2, use_cache=False)
    run = trainer(tmp_path / "posterior", MAPConfig(), model=with_lora(model))
    run.train()
    run.save_model()
    assert BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior").core.config.attn_pdrop == 0.0
    tiny_gpt2(scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="another architecture or configuration"):
        BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
