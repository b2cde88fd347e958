from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest
import torch
from torch import nn

from hf_bayes.core.config import MethodConfig, PriorName
from hf_bayes.core.layout import Layout, select
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import LaplacePrior
from hf_bayes.distributions.priors import PRIORS, build_prior, lora_prior_ratio, prior_stds
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.distributions.laws import LIMIT, kolmogorov_smirnov, laws
from tests.tiny_models import tiny_gpt2, tiny_llama, with_lora

LAYOUT = Layout(("block.weight", "block.bias", "head.weight"), ((2, 2), (2,), (3,)))
START = torch.arange(9.0)
MODEL = nn.Module()  # only the prior "he" reads the model


def test_one_std_holds_everywhere() -> None:
    prior = build_prior(SGHMCConfig(prior_std=2.0), LAYOUT, START, MODEL)
    expected = torch.distributions.Normal(0.0, 2.0).log_prob(START).sum()
    torch.testing.assert_close(prior.log_prob(START[None])[0], expected)


def test_each_tensor_has_the_std_of_the_expression_it_matches() -> None:
    stds = {"head": 3.0, r"^block\.weight": 2.0, r"\.bias$": 1.0}
    prior = build_prior(SGHMCConfig(prior_std=stds), LAYOUT, START, MODEL)
    assert prior.std.tolist() == [2.0] * 4 + [1.0] * 2 + [3.0] * 3


def test_the_mean_may_be_the_models_own_weights() -> None:
    prior = build_prior(SGHMCConfig(prior_std=2.0, prior_mean="initial"), LAYOUT, START, MODEL)
    assert torch.equal(prior.mean, START)
    assert torch.equal(prior.grad(START[None]), torch.zeros(1, 9))
    assert torch.equal(build_prior(SGHMCConfig(prior_std=2.0), LAYOUT, START, MODEL).mean, torch.tensor(0.0))


@pytest.mark.parametrize(
    ("stds", "message"),
    [
        ({"weight": 1.0}, r"no expression that matches the random parameter block.bias: got \['weight'\]"),
        ({".": 1.0, "weight": 2.0}, r"several .* parameter block.weight: got \['.', 'weight'\], expected one"),
        ({".": 1.0, "haed": 2.0}, r"\['haed'\] match no random parameter \(the first is block.weight\)"),
    ],
)
def test_expressions_and_parameters_must_meet(stds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_prior(SGHMCConfig(prior_std=stds), LAYOUT, START, MODEL)


def test_prior_follows_the_dtype_of_theta() -> None:
    for std in (1.0, {".": 1.0}):
        prior = build_prior(SGHMCConfig(prior_std=std), LAYOUT, START.double(), MODEL)
        assert prior.std.dtype == prior.mean.dtype == torch.float64


def test_lora_prior_ratio_is_that_of_draws_from_the_prior() -> None:
    model = with_lora(
        tiny_llama(hidden_size=64), r=8, lora_alpha=32, target_modules=["q_proj"], layers_to_transform=[0]
    )
    layout = select(model)
    stds = {"lora_A": 0.5, "lora_B": 0.2}
    found = lora_prior_ratio(
        model, layout, build_prior(SGHMCConfig(prior_std=stds), layout, torch.zeros(layout.dim), model)
    )
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
        lora_prior_ratio(model, layout, build_prior(SGHMCConfig(prior_std=1.0), layout, torch.zeros(layout.dim), model))
        is None
    )


# ------------------------------------------------------------------------------------------------- other densities


def test_every_name_has_a_density() -> None:
    assert set(PRIORS) == set(get_args(PriorName))


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
@pytest.mark.statistics
def test_samplers_follow_the_prior_where_the_likelihood_is_flat(name: str) -> None:
    std, rate = math.sqrt(2), 0.04  # h = 0.2 where the double exponential has b = 1
    prior = PRIORS[name](torch.tensor(0.0), torch.tensor(std))
    rule = assemble(
        BAOABConfig(momentum=0.8), Problem(1.0, prior, rate, num_steps=300, burn_in=0, shapes={"": (4096,)})
    )
    assert isinstance(rule, Rule)
    rngs = [generator("chain", chain) for chain in range(4)]
    state = rule.init(torch.zeros(4, 4096), rngs)
    flat = Evaluation(torch.zeros(4), torch.zeros(4, 4096))
    for _ in range(300):  # 60 units of time; the slowest mode of the double exponential decays in 4, at high friction
        _, state = rule.locate(state, rngs)
        state, _ = rule.update(state, flat, rate, rngs)
    other = next(law for kind, law in laws(std).items() if kind != name)
    assert kolmogorov_smirnov(state.theta, laws(std)[name]) < LIMIT
    assert kolmogorov_smirnov(state.theta, other) > LIMIT  # the broken twin has the same variance
    assert kolmogorov_smirnov(state.theta, laws(1.1 * std)[name]) > LIMIT  # and 10 % too wide


def test_he_scales_matrices_by_their_fan_in_and_leaves_biases() -> None:
    model = tiny_gpt2(n_embd=8)
    layout = select(model, "last_block")
    prior = build_prior(SGHMCConfig(prior="he", prior_std=3.0), layout, torch.zeros(layout.dim), model)
    stds = {name.removeprefix("transformer.h.1."): value for name, value in layout.unflatten(prior.std.clone()).items()}
    # 8 -> 24 and 32 -> 8 in layers of GPT-2, whose weights are [in, out]
    for name, fan_in in (("attn.c_attn.weight", 8), ("mlp.c_proj.weight", 32)):
        assert torch.allclose(stds[name], torch.tensor(3 * math.sqrt(2 / fan_in)))
    assert set(torch.cat([stds["attn.c_attn.bias"], stds["ln_1.weight"]]).tolist()) == {3.0}
    kernel = nn.Sequential(nn.Conv2d(3, 4, 5), nn.Linear(6, 2), nn.Embedding(9, 7))
    layout = select(kernel, "all")
    scaled = build_prior(SGHMCConfig(prior="he"), layout, torch.zeros(layout.dim), kernel)
    means = [float(part.unique()) for part in layout.unflatten(scaled.std).values()]
    assert means == pytest.approx(
        [math.sqrt(2 / 75), 1.0, math.sqrt(2 / 6), 1.0, math.sqrt(2 / 7)]
    )  # k^2 d: the paper's footnote 12


@pytest.mark.statistics
def test_the_trainer_uses_and_records_the_named_prior(tmp_path: object) -> None:
    run = runs.trainer(f"{tmp_path}/out", SGHMCConfig(prior="laplace", prior_std=0.5, num_chains=2), max_steps=2)
    run.train()
    assert isinstance(run.active.problem.prior, LaplacePrior)
    assert run.posterior.config.prior == {"name": "laplace", "std": 0.5, "mean": "zero"}
    scaled = runs.trainer(f"{tmp_path}/he", SGHMCConfig(prior="he", prior_std=0.5, num_chains=2))
    active = runs.started(scaled)
    for name, std in scaled.bayesian.layout.unflatten(active.prior.std).items():
        if ".q_proj." in name:  # rank 2 on 16 columns
            assert torch.allclose(std, torch.tensor(0.5 * math.sqrt(2 / (16 if "lora_A" in name else 2))))
    with pytest.raises(ValueError, match="laplace: prior must be one of gaussian, he, got 'laplace'"):
        LaplaceConfig(prior="laplace")


@pytest.mark.parametrize("alpha", [4, 64])
@pytest.mark.parametrize("rank", [2, 8])
def test_the_default_prior_changes_weights_by_their_rms(alpha: int, rank: int) -> None:
    """The standard deviation of Delta W over draws is the RMS of the weight, for every rank and alpha."""
    model = with_lora(tiny_llama(), r=rank, lora_alpha=alpha)
    layout = select(model)
    prior = build_prior(SGHMCConfig(), layout, torch.zeros(layout.dim), model)
    assert lora_prior_ratio(model, layout, prior) == pytest.approx(1.0, rel=1e-5)
    stds = layout.unflatten(prior.std)
    draws = [layout.unflatten(draw) for draw in prior.sample(200, layout.dim, generator("prior"))]
    path = next(name for name in layout.names if ".lora_A." in name).split(".lora_A.")[0]
    layer = model.get_submodule(path)
    names = [f"{path}.lora_{letter}.default.weight" for letter in "AB"]
    changes = torch.stack([alpha / rank * draw[names[1]] @ draw[names[0]] for draw in draws])
    assert float(changes.std() / layer.get_base_layer().weight.square().mean().sqrt()) == pytest.approx(1, rel=0.05)
    fan_in = layer.get_base_layer().in_features
    assert float(stds[names[0]].mean()) == pytest.approx(1 / math.sqrt(3 * fan_in))  # that of peft's own start


def test_tensors_that_are_no_lora_have_a_default_std_of_one() -> None:
    assert build_prior(SGHMCConfig(), LAYOUT, START, MODEL).std == 1
    model = with_lora(tiny_llama())
    layout = select(model)
    he = build_prior(SGHMCConfig(prior="he"), layout, torch.zeros(layout.dim), model)
    given = build_prior(SGHMCConfig(prior="he", prior_std=1.0), layout, torch.zeros(layout.dim), model)
    assert torch.equal(he.std, given.std)


@pytest.mark.parametrize("method", [MAPConfig(), EnsembleConfig(), SWAGConfig(), MCDropoutConfig(dropout=0.1)])
def test_modes_have_a_wider_default_prior_beside_lora(method: MethodConfig) -> None:
    model = with_lora(tiny_llama())
    layout = select(model)
    narrow, wide = prior_stds(SGHMCConfig(), layout, model), prior_stds(method, layout, model)
    for name in layout.names:
        assert wide[name] == pytest.approx((1 if "lora_A" in name else 4) * narrow[name])
    assert prior_stds(method, select(tiny_llama(), "last_layer"), tiny_llama()) == 1.0


@pytest.mark.parametrize("prior_std", [None, 0.3, {"lora_A": 0.1, "lora_B": 0.2}])
@pytest.mark.parametrize("prior", ["gaussian", "he"])
def test_prior_scale_multiplies_given_and_default_stds(prior_std: Any, prior: PriorName) -> None:
    model = with_lora(tiny_llama())
    layout, start = select(model), torch.zeros(1)
    one, four = (
        build_prior(SGHMCConfig(prior=prior, prior_std=prior_std, prior_scale=scale), layout, start, model)
        for scale in (1.0, 4.0)
    )
    torch.testing.assert_close(four.std, 4 * one.std)


def test_the_default_of_lora_is_recorded_tensor_by_tensor() -> None:
    model = with_lora(tiny_llama())
    layout = select(model)
    found = prior_stds(SGHMCConfig(), layout, model)
    assert set(found) == set(layout.names)
    start = torch.zeros(layout.dim)
    same = SGHMCConfig(prior_std={f"^{re.escape(name)}$": std for name, std in found.items()})
    assert torch.equal(
        build_prior(same, layout, start, model).std, build_prior(SGHMCConfig(), layout, start, model).std
    )
    assert prior_stds(SGHMCConfig(), select(tiny_llama(), "last_layer"), tiny_llama()) == 1.0
    assert prior_stds(SGHMCConfig(prior_std=0.3), layout, model) == 0.3
