from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, VeraConfig, get_peft_model
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    NemotronConfig,
    NemotronForCausalLM,
)
from transformers.models.ibert.quant_modules import IntLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.squeezebert.modeling_squeezebert import SqueezeBertLayerNorm

from hf_bayes.core.layout import select
from hf_bayes.members import Members
from hf_bayes.members.context import Context
from hf_bayes.members.stacked import cast, fold, unfold
from hf_bayes.members.stacked_module import Stacked
from hf_bayes.models.attaching import attach
from hf_bayes.models.prediction.inputs import member_outputs
from tests.members.reference import core_of, relative_error, scattered, separate_gradients, separate_logits
from tests.members.subjects import labelled
from tests.tiny_models import VOCABULARY, batch, tiny_gpt2, tiny_llama, with_lora


class Small(nn.Module):
    """A model with one module under test, called on [B, ...]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class FilterResponseNorm(nn.Module):
    """Singh and Krishnan 2019: each channel over the root mean square of its positions, above a threshold."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.threshold = (nn.Parameter(torch.randn(channels, 1, 1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(self.weight * x + self.bias, self.threshold)


@pytest.mark.parametrize(
    ("inner", "x"),
    [
        (nn.Linear(4, 3), torch.randn(2, 5, 4)),
        (nn.Linear(4, 3, bias=False), torch.randn(2, 4)),
        (nn.LayerNorm(4), torch.randn(2, 5, 4)),
        (nn.LayerNorm((3, 4)), torch.randn(2, 5, 3, 4)),
        (nn.LayerNorm(4, bias=False), torch.randn(2, 4)),
        (nn.RMSNorm(4), torch.randn(2, 5, 4)),
        (nn.RMSNorm(4, eps=0.1), torch.randn(2, 5, 4)),
        (FilterResponseNorm(3), torch.randn(2, 3, 4, 4)),
        (NemotronLayerNorm1P(4), torch.randn(2, 5, 4)),
        (SqueezeBertLayerNorm(4), torch.randn(2, 4, 4)),  # as many positions as channels
        (nn.Embedding(6, 4), torch.arange(6).view(2, 3)),
        (nn.Embedding(6, 4), torch.arange(3)[None]),
    ],
)
def test_each_module_equals_copies_with_one_members_weights(inner: nn.Module, x: torch.Tensor) -> None:
    model = Small(inner).double()
    layout = select(model, "all")
    theta = scattered(model, layout)
    expected = []
    for row in theta:
        twin = copy.deepcopy(model)
        twin.load_state_dict(layout.unflatten(row))
        expected.append(twin(x.double() if x.is_floating_point() else x))
    engine = Members(model, model, layout)
    engine.install()
    x = x.double() if x.is_floating_point() else x
    with engine.bind(theta):
        found = engine.forward({"x": x}).unflatten(0, (3, -1))
    assert relative_error(found.detach(), torch.stack(expected).detach()) < 1e-14


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: with_lora(tiny_llama(), use_dora=True), r"q_proj: the LoRA variant DoraLinearVariant"),
        (lambda: with_lora(tiny_llama(), lora_bias=True), r"q_proj: .*lora_bias=True"),
        (lambda: with_lora(tiny_llama(), target_modules=["embed_tokens"]), r"on Embedding by peft's class Embedding"),
        (lambda: get_peft_model(tiny_llama(), IA3Config(task_type="CAUSAL_LM")), r"k_proj .*ia3.*Linear\) is an"),
        (
            lambda: get_peft_model(tiny_llama(), VeraConfig(target_modules=["o_proj"], r=2)),
            r"o_proj .*vera.*Linear\) is an adapter not",
        ),
        (
            lambda: get_peft_model(tiny_llama(), AdaLoraConfig(task_type="CAUSAL_LM", total_step=10)),
            r"_proj .*SVDLinear, AdaLoRA\) is an adapter not supported as random: its ranks",
        ),
        (lambda: merged(with_lora(tiny_llama())), r"q_proj: a merged adapter"),
        (lambda: disabled(with_lora(tiny_llama())), r"q_proj: a disabled adapter"),
        (lambda: two_active(with_lora(tiny_llama())), r"q_proj: 2 active adapters \['default', 'second'\]"),
        (lambda: other_active(with_lora(tiny_llama())), r"q_proj: \S+lora_A.second.weight, no factor "),
        (lambda: with_lora(tiny_llama(), target_parameters=["gate_proj.weight"]), r"LoRA on Linear|not supported"),
        (lambda: nn.Sequential(nn.Conv3d(3, 4, 1)), r"0 \(torch.nn.modules.conv.Conv3d, .*not supported as random"),
        (lambda: nn.Sequential(IntLayerNorm(4, 1e-5)), r"0 \(\S+IntLayerNorm, .*not supported as random"),
        (lambda: nn.MultiheadAttention(4, 2), r"the model \(.*MultiheadAttention, .*in_proj_weight.*not supported"),
    ],
    ids=["dora", "lora bias", "lora on embedding", "ia3", "vera", "adalora", "merged", "disabled", "two adapters",
         "inactive", "target parameters", "convolution", "norm of two inputs", "fused attention"],
)  # fmt: skip
def test_what_cannot_be_stacked_is_refused_by_name(make: Callable[[], nn.Module], named: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=named) as refused:
        Members(model, core_of(model), select(model, "trainable" if isinstance(model, PeftModel) else "all"))
    assert "Supported: torch.nn.Linear" in str(refused.value)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_with_a_forward_of_its_own_has_its_gradient() -> None:
    config = NemotronConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = NemotronForCausalLM(config).double().eval()
    layout = select(model, "norm")
    theta = scattered(model, layout)
    _, expected = separate_gradients(model, layout, theta, [labelled("llama-lora")] * 3)
    with attach(model, theta, subspace="norm") as bayesian:
        leaf = theta.clone().requires_grad_()
        bayesian(**labelled("llama-lora"), theta=leaf).loss.sum().backward()
    assert relative_error(leaf.grad, expected) < 1e-13


class Distances(nn.Module):
    """Attention's table of relative positions, as in Wav2Vec2-BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.distance_embedding = nn.Embedding(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        return x[..., None] + self.distance_embedding(places[:, None] - places + 5).mean(0)


@pytest.mark.parametrize("positions", [6, 5], ids=str)
def test_a_table_of_distances_is_refused_at_every_length(positions: int) -> None:
    model = Distances()
    layout = select(model, "all")
    engine = Members(model, model, layout)
    engine.install()
    x = torch.randn(2, positions)
    with engine.bind(scattered(model, layout, 3)), pytest.raises(ValueError, match=r"distance_embedding.*on a table"):
        engine.forward({"x": x})
    with engine.bind(scattered(model, layout, 1)):  # a single member may read it
        assert engine.forward({"x": x}).shape == (2, positions, 3)


@pytest.mark.parametrize("num_rows", [4, 1])
def test_the_table_of_deberta_is_refused_with_advice(num_rows: int) -> None:
    def model(**lora: object) -> PeftModel:
        config = DebertaV2Config(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, share_att_key=True,
            max_position_embeddings=32,
        )  # fmt: skip
        core = DebertaV2ForSequenceClassification(config)
        return get_peft_model(core, LoraConfig(r=2, task_type="SEQ_CLS", **lora)).eval()

    advice = r"query_proj.* with 1 rows.*on a table.*target_modules=\['value_proj', 'dense'\]"
    with attach(model(), num_members=3) as bayesian, pytest.raises(ValueError, match=advice):
        bayesian(**batch(num_rows))
    with attach(model(target_modules=["value_proj", "dense"]), num_members=3) as bayesian:
        bayesian(**batch(num_rows))


def test_a_disabled_adapter_leaves_the_base_model() -> None:
    model = with_lora(tiny_llama())
    base = model.get_base_model()(**batch()).logits if model.base_model.disable_adapter_layers() is None else None
    model.base_model.enable_adapter_layers()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    theta = scattered(model, select(model))
    with torch.no_grad(), attach(model, theta) as bayesian:
        adapted = bayesian(**batch()).logits
        with model.disable_adapter():
            found = bayesian(**batch())
        assert relative_error(found.logits, base.log_softmax(-1)) < 1e-5
        assert found.epistemic.max() < 1e-6
        assert torch.equal(bayesian(**batch()).logits, adapted)


@pytest.mark.parametrize("layers", [[1], None])
def test_a_base_layer_with_a_random_bias_is_stacked_too(layers: list[int] | None) -> None:
    config = LoraConfig(target_modules=["c_attn"], bias="lora_only", layers_to_transform=layers, fan_in_fan_out=True)
    model = get_peft_model(tiny_gpt2(), config)
    layout = select(model)
    assert any(name.endswith("base_layer.bias") for name in layout.names)
    theta = scattered(model, layout)
    expected = separate_logits(model, layout, theta, batch())
    with torch.no_grad(), attach(model, theta) as bayesian:
        found = member_outputs(bayesian, batch())
    assert relative_error(found, expected) < 1e-5


def test_an_adapter_that_is_merged_later_is_refused() -> None:
    model = with_lora(tiny_llama())
    with torch.no_grad(), attach(model) as bayesian:
        before = bayesian(**batch()).logits
        model.merge_adapter()
        with pytest.raises(ValueError, match=r"q_proj.*has been merged into the base model.*unmerge_adapter\(\)"):
            bayesian(**batch())
        model.unmerge_adapter()
        assert relative_error(bayesian(**batch()).logits, before) < 1e-5


def merged(model: nn.Module) -> nn.Module:
    model.merge_adapter()
    return model


def disabled(model: nn.Module) -> nn.Module:
    model.base_model.disable_adapter_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def two_active(model: nn.Module) -> nn.Module:
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    return model


def other_active(model: nn.Module) -> nn.Module:
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".second." in name)
    return model


def test_a_frozen_second_adapter_is_left_alone() -> None:
    model = with_lora(tiny_llama())
    model.add_adapter("second", model.peft_config["default"])
    assert all(".default." in name for name in select(model).names)
    with attach(model) as bayesian:
        bayesian(**batch())


def test_attaching_twice_is_refused() -> None:
    model = tiny_llama()
    with attach(model, subspace="last_block"), pytest.raises(ValueError, match="attached already: detach"):
        attach(model, subspace="last_block")
    attach(model, subspace="last_block").detach()


def test_target_modules_that_match_nothing_are_named() -> None:
    model = with_lora(tiny_llama(), target_modules=["q_proj", "v_porj"])
    with pytest.warns(UserWarning, match=r"target_modules \['v_porj'\] .* match no module of LlamaForCausalLM"):
        attach(model).detach()


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.layers\.1\.self_attn\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_target_modules_that_all_match_are_no_matter(config: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attach(with_lora(tiny_llama(), **config)).detach()


def test_peft_itself_refuses_targets_of_which_none_match() -> None:
    with pytest.raises(ValueError, match="Target modules"):
        get_peft_model(tiny_gpt2(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_a_forward_that_was_an_attribute_already_is_given_back() -> None:
    model = tiny_llama()
    head, calls = model.lm_head, []
    own = head.forward
    head.forward = lambda x: calls.append(1) or own(x)  # as hooks of accelerate do
    before = head.forward
    with attach(model, subspace="last_layer") as bayesian:
        bayesian(**batch())
        assert isinstance(head.forward.__self__, Stacked)
    assert head.forward is before
    assert not calls


def test_unfold_is_the_inverse_of_fold() -> None:
    folded = torch.randn(6, 4, 5)
    split = fold(folded, 2)
    assert split.shape == (2, 12, 5)
    assert torch.equal(split[1], folded[3:].reshape(12, 5))  # row m * B + b belongs to member m
    assert torch.equal(unfold(split, folded, 2), folded)
    assert fold(split, 2) is split


def test_a_parameter_without_members_is_named() -> None:
    context = Context()
    context.tensors = {"w": torch.ones(2, 1)}
    layer = Stacked(torch.nn.Linear(1, 1), {"weight": "w", "bias": "lm_head"}, context)
    assert torch.equal(layer.tensor("weight"), torch.ones(2, 1))
    assert context.used == {"w"}
    with pytest.raises(RuntimeError, match="lm_head is random: call the BayesianModel that holds this model"):
        layer.tensor("bias")


def test_cast_leaves_dtypes_to_autocast() -> None:
    value = torch.ones(1)
    assert cast(value, torch.float64).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast(value, torch.bfloat16) is value
