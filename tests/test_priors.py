from __future__ import annotations

import pytest
import torch

from hf_bayes.priors import build_prior, lora_prior_ratio
from hf_bayes.samplers.sghmc import SGHMCConfig
from hf_bayes.subspace import Layout, select
from tests.models import tiny_llama, with_lora

LAYOUT = Layout(("block.weight", "block.bias", "head.weight"), ((2, 2), (2,), (3,)))
START = torch.arange(9.0)


def test_one_std_holds_everywhere() -> None:
    prior = build_prior(SGHMCConfig(prior_std=2.0), LAYOUT, START)
    expected = torch.distributions.Normal(0.0, 2.0).log_prob(START).sum()
    torch.testing.assert_close(prior.log_prob(START[None])[0], expected)


def test_the_first_expression_that_matches_holds() -> None:
    prior = build_prior(SGHMCConfig(prior_std={"head": 3.0, "weight": 2.0, ".": 1.0}), LAYOUT, START)
    assert prior.std.tolist() == [2.0] * 4 + [1.0] * 2 + [3.0] * 3


def test_the_mean_may_be_the_models_own_weights() -> None:
    prior = build_prior(SGHMCConfig(prior_std=2.0, prior_mean="initial"), LAYOUT, START)
    assert torch.equal(prior.mean, START)
    assert torch.equal(prior.grad(START[None]), torch.zeros(1, 9))
    assert torch.equal(build_prior(SGHMCConfig(prior_std=2.0), LAYOUT, START).mean, torch.tensor(0.0))


@pytest.mark.parametrize(
    ("stds", "message"),
    [
        ({"weight": 1.0}, r"no expression that matches the random parameter block.bias: got \['weight'\]"),
        ({".": 1.0, "haed": 2.0}, r"\['haed'\] match no random parameter \(the first is block.weight\)"),
    ],
)
def test_expressions_and_parameters_must_meet(stds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_prior(SGHMCConfig(prior_std=stds), LAYOUT, START)


def test_prior_follows_the_dtype_of_theta() -> None:
    for std in (1.0, {".": 1.0}):
        prior = build_prior(SGHMCConfig(prior_std=std), LAYOUT, START.double())
        assert prior.std.dtype == prior.mean.dtype == torch.float64


def test_lora_prior_ratio_is_that_of_draws_from_the_prior() -> None:
    model = with_lora(
        tiny_llama(hidden_size=64), r=8, lora_alpha=32, target_modules=["q_proj"], layers_to_transform=[0]
    )
    layout = select(model)
    stds = {"lora_A": 0.5, "lora_B": 0.2}
    found = lora_prior_ratio(model, layout, build_prior(SGHMCConfig(prior_std=stds), layout, torch.zeros(layout.dim)))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(200, 8, 64, generator=generator) * 0.5, torch.randn(200, 64, 8, generator=generator) * 0.2
    implied = 32 / 8 * (b @ a).std() / layer.base_layer.weight.square().mean().sqrt()
    # entries of one draw share A and B: 200 draws of rank 8 pin the standard deviation to about 1 %
    assert found == pytest.approx(float(implied), rel=0.03)


def test_without_lora_there_is_no_ratio() -> None:
    model = tiny_llama()
    layout = select(model, "last_layer")
    assert (
        lora_prior_ratio(model, layout, build_prior(SGHMCConfig(prior_std=1.0), layout, torch.zeros(layout.dim)))
        is None
    )
