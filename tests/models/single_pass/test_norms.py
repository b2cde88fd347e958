"""Norms against the Jacobians of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_bayes.models.single_pass.norms import eps_of, gain_of, layer_norm_variance, rms_norm_variance
from tests.models.single_pass.cases import normal

MEAN, VARIANCE, GAIN = normal(5) + 0.5, normal(5, seed=1).square(), normal(5, seed=2)


def by_jacobian(function: object) -> Tensor:
    jacobian = torch.func.jacrev(function)(MEAN)  # type: ignore[arg-type]
    return jacobian.square() @ VARIANCE


def test_layer_norm_is_its_jacobian() -> None:
    expected = by_jacobian(lambda x: nn.functional.layer_norm(x, (5,), GAIN, None, 1e-5))
    assert (layer_norm_variance(MEAN, VARIANCE, GAIN, 1e-5) - expected).abs().max() < 1e-5 * expected.max()  # eps


def test_rms_norm_is_its_jacobian() -> None:
    expected = by_jacobian(lambda x: nn.functional.rms_norm(x, (5,), GAIN, 1e-5))
    assert (rms_norm_variance(MEAN, VARIANCE, GAIN, 1e-5) - expected).abs().max() < 1e-4 * expected.max()  # eps
    assert (rms_norm_variance(MEAN, VARIANCE, None, 1e-5) - expected).abs().max() > 0.01 * expected.max()


def test_gain_of_model_families_is_found() -> None:
    llama, gemma = LlamaRMSNorm(5).double(), GemmaRMSNorm(5).double()
    llama.weight.data, gemma.weight.data = GAIN.clone(), GAIN.clone()
    assert (gain_of(llama, eps_of(llama), MEAN) - GAIN).abs().max() < 1e-6  # their norms are in float32
    assert (gain_of(gemma, eps_of(gemma), MEAN) - 1 - GAIN).abs().max() < 1e-6
