from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, T5ForSequenceClassification

from hf_bayes.core.layout import initial, select
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.uncertainty.custom.base import Moments
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from tests import runs
from tests.members.reference import scattered
from tests.models.prepared import prepared, unchanged
from tests.tiny_models import EOS, VOCABULARY, batch, tiny_bert, tiny_gpt2, tiny_llama, with_lora


def test_without_theta_all_members_are_the_model_itself() -> None:
    model = tiny_llama()
    expected = model(**batch()).logits.log_softmax(-1)
    with torch.no_grad(), attach(model, subspace="last_block", num_members=3) as bayesian:
        output = bayesian(**batch())
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-5)  # float32
    assert torch.equal(output.epistemic, torch.zeros_like(output.epistemic))


def test_an_adapter_that_nobody_could_load_again_is_refused() -> None:
    # as peft leaves a model whose adapter began by a randomised decomposition of its weights
    model = with_lora(tiny_llama())
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    with pytest.raises(ValueError, match=r"'pissa_niter_4' takes a random decomposition .* Use 'pissa'"):
        attach(model)


def _unsupported_in_the_middle() -> nn.Module:
    model = tiny_llama()
    gate = nn.Bilinear(2, 2, 2)
    model.model.layers[1].mlp.gate = gate
    return model


@pytest.mark.parametrize(
    ("make", "subspace", "reason"),
    [
        (_unsupported_in_the_middle, ".", r"layers\.1\.mlp\.gate .*Bilinear"),
        (lambda: with_lora(tiny_llama(), use_dora=True), "trainable", "Dora"),
        (lambda: tiny_llama().requires_grad_(False), "trainable", "selects 0 parameters"),
        (tiny_gpt2, "nowhere", "subspace='nowhere' selects 0 parameters"),
    ],
)
def test_a_refused_attach_leaves_the_model_alone(make: Callable[[], nn.Module], subspace: str, reason: str) -> None:
    model = make()
    with unchanged(model), pytest.raises(ValueError, match=reason):
        attach(model, subspace=subspace)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError])
def test_a_likelihood_that_fails_leaves_the_model_alone(error: type[Exception]) -> None:
    class Failing(Heteroscedastic):
        def predict(self, outputs: Tensor) -> Moments:
            raise error("not written yet")

    model = tiny_bert(num_labels=2)
    with unchanged(model), pytest.raises(error, match="not written yet"):
        attach(model, subspace="last_layer", likelihood=Failing())
    attach(model, subspace="last_layer", likelihood=Heteroscedastic()).detach()


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (5,), (3, 2, 5), "bfloat16"], ids=str)
def test_members_of_another_shape_or_dtype_are_refused(shape: tuple[int, ...] | str) -> None:
    model = tiny_llama()
    own = initial(model, select(model, "last_block"))[None]
    theta = own.bfloat16() if shape == "bfloat16" else torch.zeros(shape)
    with unchanged(model), pytest.raises(ValueError, match=r"theta must be float32 or float64 \[members, \d+\]"):
        attach(model, theta, subspace="last_block")


def test_a_model_attached_again_is_as_good_as_new() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    answers = []
    for _ in range(2):
        with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
            answers.append(bayesian(**batch()).logits)
    assert torch.equal(*answers)


def _t5(kind: type) -> nn.Module:
    return kind(
        T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=EOS)
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _t5(T5ForConditionalGeneration), "T5ForConditionalGeneration is an encoder-decoder model"),
        (lambda: _t5(T5ForSequenceClassification), "T5ForSequenceClassification is an encoder-decoder model"),
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: _mapped(model="cuda:0", lm_head="cuda:1"), r"spread over \['cuda:0', 'cuda:1'\]: members need it"),
        (lambda: _mapped(model=0, lm_head="disk"), r"spread over \['0', 'disk'\]: members need it on one"),
        (lambda: _head_offloaded(), r"spread over \['cpu', 'meta'\]: members need it on one"),
        (lambda: tiny_llama().to("meta"), r"spread over \['meta'\]: members need it on one"),
    ],
    ids=["t5", "t5 classifier", "plain module", "two GPUs", "disk", "head on no device", "offloaded"],
)
def test_models_of_another_kind_are_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        attach(model, subspace=".")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig, PromptEncoderConfig])
@pytest.mark.parametrize("subspace", ["trainable", "last_layer"])
def test_adapters_of_virtual_tokens_are_refused_when_attached(config: type, subspace: str) -> None:
    model = get_peft_model(tiny_llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=2))
    kind = model.peft_config["default"].peft_type.value
    with pytest.raises(ValueError, match=f"peft's {kind} adds virtual tokens .* Use LoRA"):
        attach(model, subspace=subspace)


def _mapped(**devices: str | int) -> nn.Module:
    """Return a model as accelerate leaves it after it has placed its modules on devices."""
    model = tiny_llama()
    model.hf_device_map = devices
    return model


def _head_offloaded() -> nn.Module:
    model = tiny_llama()
    model.lm_head.to("meta")
    return model


def test_a_base_spread_over_devices_is_refused_on_every_way_in(tmp_path: Path) -> None:
    spread_out = r"spread over \['cuda:0', 'cuda:1'\]: members need it on one device"
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=2)
    trainer.train()
    trainer.save_model()
    base = _mapped(model="cuda:0", lm_head="cuda:1")
    with pytest.raises(ValueError, match=spread_out):
        BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=base)
    base = with_lora(base)
    with pytest.raises(ValueError, match=spread_out):
        attach(base)
    with pytest.raises(ValueError, match=spread_out):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=base)
    layout = select(base)
    with pytest.raises(ValueError, match=spread_out):
        BayesianModelForCausalLM(base, layout, scattered(base, layout))
    assert sum(parameter.requires_grad for parameter in base.parameters()) == len(layout.names)


def test_tied_weights_are_one_random_tensor() -> None:
    model = tiny_gpt2()
    with attach(model, subspace="lm_head|wte", num_members=2) as bayesian:
        assert bayesian.layout.names == ("transformer.wte.weight",)
        assert bayesian.theta.shape == (2, VOCABULARY * 16)
