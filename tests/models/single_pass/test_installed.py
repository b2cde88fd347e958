"""Modules with random weights, one at a time, in both structures."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes.models.single_pass.driver import SinglePass
from hf_bayes.models.single_pass.gaussian_tensor import mean_of
from hf_bayes.models.single_pass.installed import frozen_forward
from scripts.reproduce.small_models import attached
from tests.models.single_pass.cases import DOUBLE
from tests.tiny_models import batch, inputs_of, tiny_bert, tiny_gpt2, tiny_llama, with_lora

MODULES = {
    "linear": (lambda: tiny_bert(dtype=DOUBLE), r"pooler\.dense"),
    "Conv1D": (lambda: tiny_gpt2(dtype=DOUBLE), r"h\.1\.mlp\.c_proj"),
    "LoRA and bias": (lambda: with_lora(tiny_bert(dtype=DOUBLE), bias="lora_only"), "trainable"),
    "LoRA and bias of Conv1D": (
        lambda: with_lora(tiny_gpt2(dtype=DOUBLE), target_modules=["c_fc"], bias="lora_only"),
        "trainable",
    ),
    "LoRA": (lambda: with_lora(tiny_gpt2(dtype=DOUBLE), target_modules=["c_fc"]), "trainable"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("structure", ["low_rank", "diagonal", "full"])
def test_first_random_layer_has_the_variance_of_members(name: str, structure: str) -> None:
    build, subspace = MODULES[name]
    with attached(build(), subspace) as bayesian:
        gaussian = bayesian.posterior.approximation
        one = SinglePass(bayesian.members, gaussian.means[0], gaussian.covariances[0], structure=structure, rank=2000)
        random = one.random[0]
        found: list[torch.Tensor] = []
        with one.open(), random.module.register_forward_hook(lambda m, x, y: found.append(y)):
            bayesian.members.forward(batch(rows=2))
        draws = []
        for theta in gaussian.sample(2000, torch.Generator().manual_seed(0)).split(500):
            hook = random.module.register_forward_hook(lambda m, x, y: draws.append(y))
            with bayesian.members.bind(theta), hook:
                bayesian.members.forward(batch(rows=2))
    # the block is the first with noise, so its input is equal for all draws
    members = torch.cat([y.view(500, -1, *y.shape[1:]) for y in draws])
    ratio = found[0].spread.variance / members.var(0)  # type: ignore[attr-defined]
    assert (ratio.mean() - 1).abs() < 0.02
    assert (ratio - 1).abs().max() < 0.2
    assert type(mean_of(found[0])) is torch.Tensor


@pytest.mark.parametrize("structure", ["low_rank", "full"])
def test_a_random_bias_below_lora_reaches_the_outputs(structure: str) -> None:
    model = with_lora(tiny_bert(dtype=DOUBLE), bias="lora_only")
    inputs = inputs_of(model)
    with attached(model, "trainable", 1e-10) as bayesian:
        exact = bayesian.single_pass(structure="backward", rank=3).predictor.outputs(bayesian, inputs)[1]
        options = {"rank": 4000} if structure == "low_rank" else {}
        found = bayesian.single_pass(structure=structure, **options).predictor.outputs(bayesian, inputs)[1]
    # draws leave sqrt(2 / 4000); the noise of the biases is more than 6 % of the variance
    ratio = found.diagonal(dim1=-2, dim2=-1).sum() / exact.diagonal(dim1=-2, dim2=-1).sum()
    assert abs(float(ratio) - 1) < (0.023 if structure == "low_rank" else 1e-6)


@pytest.mark.parametrize("structure", ["low_rank", "diagonal", "full"])
def test_a_disabled_adapter_has_no_part_and_no_noise(structure: str) -> None:
    model = with_lora(tiny_gpt2(dtype=DOUBLE), target_modules=["c_fc"])
    inputs = batch(rows=2)
    with torch.no_grad(), model.disable_adapter():
        expected = model(**inputs).logits
    with attached(model, "trainable") as bayesian, torch.no_grad():
        gaussian = bayesian.posterior.approximation
        one = SinglePass(bayesian.members, gaussian.means[0], gaussian.covariances[0], structure=structure)

        def run() -> Any:
            with one.open():
                return bayesian.members.forward(inputs).logits

        before = run()
        with model.disable_adapter():
            found = run()
        after = run()
    assert torch.equal(mean_of(found), expected)
    assert found.spread.variance.max() == 0
    assert not torch.equal(mean_of(before), expected)
    assert before.spread.variance.min() > 0
    assert torch.equal(after.spread.variance, before.spread.variance)


def test_a_merged_adapter_is_refused_by_name() -> None:
    model = with_lora(tiny_gpt2(dtype=DOUBLE), target_modules=["c_fc"])
    with attached(model, "trainable") as bayesian:
        gaussian = bayesian.posterior.approximation
        one = SinglePass(bayesian.members, gaussian.means[0], gaussian.covariances[0])
        model.merge_adapter()
        with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc: its adapter has been merged"), one.open():
            bayesian.members.forward(batch(rows=2))
        model.unmerge_adapter()


def test_ordinary_modules_keep_their_forward() -> None:
    assert frozen_forward(nn.Linear(2, 2)) is None
    assert frozen_forward(nn.LayerNorm(2)) is None
    assert frozen_forward(tiny_gpt2().transformer.h[0].mlp.c_fc) is not None


FROZEN = {
    "RMSNorm and SiLU": lambda: with_lora(tiny_llama(dtype=DOUBLE)),
    "Conv1D and GELU": lambda: with_lora(tiny_gpt2(dtype=DOUBLE), target_modules=["c_attn"]),
}


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_modules(name: str, copied: Any) -> None:
    inputs = batch(rows=2)
    with attached(FROZEN[name](), "trainable") as bayesian, torch.no_grad():
        other = copied(bayesian.single_pass(structure="diagonal"))
        before = bayesian(**inputs)
        for value in bayesian.core.parameters():
            value.mul_(2)
        found = other(**inputs)
        assert not torch.equal(bayesian(**inputs).logits, before.logits)
    assert torch.equal(found.logits, before.logits)
    assert torch.equal(found.epistemic, before.epistemic)
