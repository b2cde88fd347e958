"""A LoRA built from names alone is the one that its expressions had matched, here and in plain peft."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.distributions.approximations import Draws
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.loading.base_model import adapter_config
from hf_bayes.models.loading.lora_layers import build, changed_by, names_of
from hf_bayes.posteriors.posterior import Posterior
from tests.faults.posteriors import config
from tests.tiny_models import batch, tiny_llama, with_lora

LORAS: dict[str, dict[str, Any]] = {
    "a regular expression": {"target_modules": r".*\.1\.(self_attn\.q_proj|mlp\.up_proj)"},
    "every linear layer": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"},
    "one layer": {"layers_to_transform": [1], "layers_pattern": ["layers"]},
    "ranks and alphas": {"rank_pattern": {r".*\.1\..*q_proj": 3}, "alpha_pattern": {r"^model.*v_proj": 7, "q_proj": 5}},
    "copies": {"modules_to_save": ["norm", "lm_head"]},
    "pissa": {"init_lora_weights": "pissa", "init_b": 0},
    "olora": {"init_lora_weights": "olora", "init_b": 0},
    "orthogonal": {"init_lora_weights": "orthogonal", "init_b": 0},
}


def saved(model: PeftModel, folder: Path) -> Posterior:
    layout = select(model)
    theta = torch.stack([initial(model, layout) + 0.1 * i for i in range(2)])
    parameters = [[name, list(shape)] for name, shape in layout.named_shapes.items()]
    base = {**config().base_model, "dtype": None, "fingerprint": dict.fromkeys(("weights", "config", "tokenizer"))}
    posterior = Posterior(
        Draws(theta, torch.arange(2)),
        config(task="causal_lm", num_members=2, parameters=parameters, base_model=base),
        adapter_config(model),
    )
    posterior.save_pretrained(folder)
    return posterior


def layers_of(model: PeftModel) -> dict[str, tuple[int, float]]:
    found = model.get_base_model().named_modules()
    return {n: (layer.r["default"], layer.scaling["default"]) for n, layer in found if isinstance(layer, LoraLayer)}


@pytest.mark.parametrize("kind", LORAS)
def test_saved_names_select_equal_layers_in_peft_and_here(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base() -> nn.Module:
        return tiny_llama(num_key_value_heads=4)

    model = with_lora(base(), **LORAS[kind])
    expected, names = layers_of(model), {name for name, _ in model.named_parameters()}
    logits = model.eval()(**batch()).logits
    saved(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = PeftModel.from_pretrained(base(), tmp_path)
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=base(), members=2)
    for found in (plain, loaded.model):
        assert layers_of(found) == expected
        assert {name for name, _ in found.named_parameters()} == names
    assert torch.equal(plain.eval()(**batch()).logits, logits)


@pytest.mark.parametrize("kind", ["pissa", "olora", "copies"])
def test_a_base_comes_back_with_its_own_weights(kind: str, tmp_path: Path) -> None:
    saved(with_lora(tiny_llama(num_key_value_heads=4), **LORAS[kind]), tmp_path)
    base = tiny_llama(num_key_value_heads=4)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    assert bool(changed_by(json.loads((tmp_path / "adapter_config.json").read_text()))) == (kind != "copies")
    assert BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=base).detach() is base
    assert all(torch.equal(base.state_dict()[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match="needs a Gaussian"):  # refused after the adapter has been built
        BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=base, prediction="linearised")
    assert all(torch.equal(base.state_dict()[name], value) for name, value in before.items())


class Nested(nn.Module):
    """Modules whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.inner = nn.ModuleDict({"proj": nn.Linear(2, 2), "deep": nn.ModuleDict({"proj": nn.Linear(2, 2)})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["deep"]["proj"](self.inner["proj"](self.proj(x)))


def test_modules_whose_names_end_alike_are_left_out_by_name() -> None:
    model = get_peft_model(Nested(), LoraConfig(r=1, target_modules=r"proj|inner\.deep\.proj"))
    names = names_of(model)
    assert names["target_modules"] == ["inner.deep.proj", "proj"]
    assert names["exclude_modules"] == ["inner.proj"]
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, **names}
    again = get_peft_model(Nested(), LoraConfig(**{k: v for k, v in fields.items() if k != "peft_type"}))
    assert layers_of(again) == layers_of(model)
    layout = Layout(*zip(*((n, tuple(p.shape)) for n, p in model.named_parameters() if "lora" in n), strict=True))
    ours = build(Nested(), {**fields, "exclude_modules": None}, layout, "causal_lm", "here")
    assert layers_of(ours) == layers_of(model)


def test_names_with_ambiguous_endings_are_refused() -> None:
    model = nn.Module()
    model.q, model.b = nn.Linear(2, 2), nn.ModuleDict({"q": nn.Linear(2, 2)})
    model.a = nn.ModuleDict({"b": nn.ModuleDict({"q": nn.Linear(2, 2)})})
    adapted = get_peft_model(model, LoraConfig(r=1, target_modules=r"q|a\.b\.q"))
    with pytest.raises(ValueError, match=r"cannot be given a\.b\.q by name and leave out \['b\.q'\]"):
        names_of(adapted)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"num_hidden_layers": 1}, "no such parameter where .*layers.1"),
        ({"hidden_size": 32}, r"a module of .* features where .*lora_A.* of shape \[2, 16\] is expected"),
    ],
)
def test_names_and_sizes_are_checked_before_peft_builds(
    base: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(with_lora(tiny_llama()), tmp_path)
    monkeypatch.setattr("hf_bayes.models.loading.lora_layers.get_peft_model", None)
    with pytest.raises(ValueError, match=message):
        BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama(**base))


def test_loading_matches_no_expression_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(with_lora(tiny_llama(), **LORAS["a regular expression"]), tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    texts = [name for field in ("target_modules", "modules_to_save") for name in written[field] or ()]
    assert all(re.fullmatch(r"[\w.]+", name) for name in [*texts, *written["rank_pattern"], *written["alpha_pattern"]])
    assert (written["exclude_modules"], written["layers_pattern"], written["layers_to_transform"]) == (None,) * 3


@pytest.mark.parametrize("rslora", [False, True])
def test_a_scaling_that_was_set_comes_back(rslora: bool, tmp_path: Path) -> None:
    model = with_lora(tiny_llama(), use_rslora=rslora, rank_pattern={"q_proj": 3})
    first, *others = (layer for layer in model.modules() if isinstance(layer, LoraLayer))
    first.set_scale("default", 0.3)
    others[-1].scale_layer(3.0)
    expected, logits = layers_of(model), model.eval()(**batch()).logits
    saved(model, tmp_path)
    plain = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama(), members=2)
    for found in (plain, loaded.model):
        assert layers_of(found) == {name: (r, pytest.approx(s, rel=1e-15)) for name, (r, s) in expected.items()}
    assert (plain(**batch()).logits - logits).abs().max() < 1e-5
    assert adapter_config(loaded.model)["alpha_pattern"] == adapter_config(model)["alpha_pattern"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("start", "scale", "message"),
    [
        (True, -1.0, r"layers\.0\..*has the scaling -.*expected more than 0.*leave the layer out of target_modules"),
        ("olora", 3.0, r"layers\.0\..*has the scaling .*'olora' began with .*Set lora_alpha"),
    ],
)
def test_scalings_that_no_alpha_gives_are_refused(start: Any, scale: float, message: str) -> None:
    model = with_lora(tiny_llama(num_key_value_heads=4), init_lora_weights=start, init_b=0)
    next(layer for layer in model.modules() if isinstance(layer, LoraLayer)).scale_layer(scale)
    with pytest.raises(ValueError, match=message):
        names_of(model)
