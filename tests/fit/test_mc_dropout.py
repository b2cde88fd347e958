from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, MCDropoutConfig, SGHMCConfig, attach, fit_mc_dropout
from hf_bayes.methods.averaging.mc_dropout import Masks
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from tests.faults import posteriors
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, tiny_llama, with_lora

P = 0.3

SHAPES = {"q.lora_A.default.weight": (2, 5), "q.lora_B.default.weight": (4, 2), "conv.lora_A.default.weight": (2, 3, 2)}


def masks_of(model: Any, p: float = P) -> Masks:
    return MCDropoutConfig(dropout=p).masks(model.layout.named_shapes)


def test_a_finished_adapter_becomes_members_under_its_dropout(tmp_path: Path) -> None:
    model = with_lora(tiny_llama(), lora_dropout=0.25)
    posterior = fit_mc_dropout(model, seed=3)
    assert posterior.config.method["dropout"] == 0.25
    theta = posterior.approximation.theta
    assert theta.shape[0] == 8
    before = posterior.layout.flatten({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    share = (theta == 0).float().mean() * len(before) / masks_of(posterior).num_inputs / 2  # A has 2 rows
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / (8 * masks_of(posterior).num_inputs)))
    posterior.save_pretrained(tmp_path)
    assert posteriors.equal(Posterior.from_pretrained(tmp_path), posterior)
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama())
    assert loaded(**batch()).epistemic.min() > 0
    assert torch.equal(fit_mc_dropout(model, seed=3).approximation.theta, theta)
    assert not torch.equal(fit_mc_dropout(model, seed=4).approximation.theta, theta)


def test_dense_weights_are_dropped_where_they_are_named() -> None:
    config = MCDropoutConfig(dropout=P, targets=r"mlp\.down_proj\.weight")
    posterior = fit_mc_dropout(tiny_llama().requires_grad_(True), config, subspace="last_block")
    tensors = posterior.layout.unflatten(posterior.approximation.theta)
    for name, tensor in tensors.items():
        assert bool((tensor == 0).any()) == ("down_proj" in name)


def test_a_model_with_a_likelihood_of_its_own_has_its_dropout() -> None:
    model = with_lora(tiny_bert(num_labels=2), lora_dropout=0.25)
    found = fit_mc_dropout(model, likelihood=Heteroscedastic())
    assert found.config.head["likelihood"] == Heteroscedastic().to_dict()
    assert torch.equal(found.approximation.theta, fit_mc_dropout(model).approximation.theta)


def test_a_posterior_has_no_dropout_of_training() -> None:
    with attach(with_lora(tiny_gpt2(), lora_dropout=0.25)) as bayesian:
        for given in (bayesian, "user/posterior"):
            with pytest.raises(ValueError, match=f"a model of transformers or peft, got {type(given).__name__}: "):
                fit_mc_dropout(given)  # type: ignore[arg-type]


def test_what_has_no_inputs_to_drop_is_refused_in_words() -> None:
    llama = tiny_llama().requires_grad_(True)
    with pytest.raises(ValueError, match=r"no random tensor is: add LoRA, or set targets .* among .*layers\.1"):
        fit_mc_dropout(llama, MCDropoutConfig(), subspace="last_block")
    with pytest.raises(ValueError, match=r"names .*layernorm.weight of shape \[16\], which reads no inputs"):
        fit_mc_dropout(llama, MCDropoutConfig(targets="layernorm"), subspace="last_block")
    with pytest.raises(ValueError, match=r"trained with lora_dropout > 0.*Pass method=MCDropoutConfig"):
        fit_mc_dropout(with_lora(tiny_gpt2()))
    with pytest.raises(ValueError, match="method must be of the class MCDropoutConfig, got SGHMCConfig"):
        fit_mc_dropout(with_lora(tiny_gpt2()), SGHMCConfig())
    with pytest.raises(ValueError, match="method must be of the class MCDropoutConfig, got str"):
        fit_mc_dropout(with_lora(tiny_gpt2()), "mc_dropout")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="under DoRA"):
        MCDropoutConfig().masks({**SHAPES, "q.lora_magnitude_vector.default.weight": (4,)})
    with pytest.raises(ValueError, match=r"dropout must be a finite number >= 0 and < 1, got 1\.0"):
        MCDropoutConfig(dropout=1.0)
    with pytest.raises(ValueError, match=r"targets must be a regular expression, got '\('"):
        MCDropoutConfig(targets="(")
