"""Modules with random weights, one at a time, in both structures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.models.single_pass.driver import SinglePass
from hf_bayes.models.single_pass.gaussian_tensor import mean_of
from hf_bayes.models.single_pass.installed import frozen_forward
from scripts.reproduce.small_models import attached
from tests.models.single_pass.cases import DOUBLE
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, with_lora

MODULES = {
    "linear": (lambda: tiny_bert(dtype=DOUBLE), r"pooler\.dense"),
    "Conv1D": (lambda: tiny_gpt2(dtype=DOUBLE), r"h\.1\.mlp\.c_proj"),
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


def test_ordinary_modules_keep_their_forward() -> None:
    assert frozen_forward(nn.Linear(2, 2)) is None
    assert frozen_forward(nn.LayerNorm(2)) is None
    assert frozen_forward(tiny_gpt2().transformer.h[0].mlp.c_fc) is not None
