from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CvtConfig,
    CvtForImageClassification,
    FalconConfig,
    FalconForCausalLM,
    MobileViTV2Config,
    MobileViTV2ForImageClassification,
    TorchAoConfig,
)

from hf_bayes.core.layout import select
from hf_bayes.members.quantised import guard
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models import base as model_module
from hf_bayes.models.attaching import attach
from tests import runs
from tests.members.reference import core_of, mixture, relative_error, scattered, separate_gradients, separate_logits
from tests.members.test_checkpointing import count_norms
from tests.models.written import generate, greedy, looped
from tests.tiny_models import batch, switch_on_checkpointing, tiny_llama, with_lora

TOLERANCE = 1e-5  # float32, a few hundred sums per number

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def labelled() -> dict[str, Tensor]:
    inputs = batch(padding="left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels.scatter_(1, inputs["attention_mask"].argmax(1, keepdim=True), -100)  # see ``subjects.labelled``
    return {**inputs, "labels": labels}


def int8_block(block: int, lora: int) -> nn.Module:
    """Return a model with torch's int8 (activations included) in one of three blocks, and LoRA on another."""
    config = {f"model.layers.{block}": default_dynamic_qconfig}
    return with_lora(quantize_dynamic(tiny_llama(num_hidden_layers=3), config), layers_to_transform=[lora])


def require_equal_to_separate_models(model: nn.Module, *, use_cache: bool = True) -> None:
    """Return logits, gradients and greedy tokens."""
    layout = select(model)
    theta, inputs = scattered(model, layout), labelled()
    prompt = {key: value for key, value in inputs.items() if key != "labels"}
    logits = separate_logits(model, layout, theta, prompt)
    losses, gradients = separate_gradients(model, layout, theta, [inputs] * len(theta))
    assert (gradients.abs().amax(1) > 1).all()
    with attach(model, theta) as bayesian:
        leaf = theta.clone().requires_grad_()
        loss = bayesian(**inputs, theta=leaf).loss
        loss.sum().backward()
        with torch.no_grad():
            found = bayesian(**prompt).logits
        tokens = generate(bayesian, prompt, eos_token_id=None, use_cache=use_cache).sequences
    assert relative_error(loss.detach(), losses) < TOLERANCE
    assert relative_error(leaf.grad, gradients) < TOLERANCE
    assert relative_error(found, mixture(logits)) < TOLERANCE
    assert torch.equal(tokens, looped(model, layout, theta, prompt, greedy))


def test_int8_below_the_random_layers_equals_separate_models() -> None:
    model = int8_block(0, lora=2)
    assert "DynamicQuantizedLinear" in str(model)
    require_equal_to_separate_models(
        model, use_cache=False
    )  # its scale depends on the batch, so on the given positions


def test_int8_that_hands_no_gradient_back_is_refused_by_name() -> None:
    model = int8_block(1, lora=0)
    with attach(model, num_members=2) as bayesian:
        with torch.no_grad():
            bayesian(**batch())  # predictions need no gradient
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj \(.*Linear\) propagates no gradient to"):
            bayesian(**labelled(), theta=bayesian.theta)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_gradient_lost_on_its_way_is_what_the_refusal_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {f"model.layers.1.mlp.{name}": default_dynamic_qconfig for name in ("gate_proj", "up_proj")}
    exact = with_lora(tiny_llama(num_hidden_layers=3), layers_to_transform=[0])
    lossy = with_lora(quantize_dynamic(tiny_llama(num_hidden_layers=3), config), layers_to_transform=[0])
    monkeypatch.setattr(model_module, "guard", lambda model: [])
    gradients = []
    for model in (exact, lossy):
        theta = scattered(model, select(model))
        with attach(model, theta) as bayesian:
            leaf = theta.clone().requires_grad_()
            bayesian(**labelled(), theta=leaf).loss.sum().backward()
        gradients.append(leaf.grad)
    assert relative_error(gradients[1], gradients[0]) > 0.1  # and there was no warning


def test_other_modules_with_linear_in_their_name_are_let_be() -> None:
    class LinearScaling(nn.Module):
        """A layer as rotary embeddings once were."""

        def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return x.detach(), positions

    model = nn.Sequential(LinearScaling())
    model[0].weight = nn.Parameter(torch.ones(3))
    handles = guard(model)
    model[0](torch.ones(2, 3, requires_grad=True), torch.arange(3))
    assert len(handles) == 1


class Int8WeightLinear(nn.Module):
    """A linear layer with weights in int8, which its forward dequantises."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("quantised", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.quantised * self.scale).mT


def int8_weights_llama() -> nn.Module:
    model = tiny_llama(dtype=torch.float64)
    for block in model.model.layers:
        block.mlp.up_proj = Int8WeightLinear(block.mlp.up_proj)
    return with_lora(model)


def falcon() -> FalconForCausalLM:
    config = FalconConfig(
        vocab_size=320, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.0
    )
    torch.manual_seed(0)
    return FalconForCausalLM(config).double()


@pytest.mark.parametrize(
    "make",
    [int8_weights_llama, lambda: with_lora(falcon(), target_modules=["query_key_value"])],
    ids=["int8", "falcon"],
)
def test_the_guard_runs_within_activation_checkpointing(make: Callable[[], nn.Module]) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = make()
        theta = scattered(model, select(model)).requires_grad_()
        with attach(model, theta.detach()) as bayesian:
            if checkpointed:
                switch_on_checkpointing(bayesian)
            runs = count_norms(model)
            bayesian.train()(**labelled(), theta=theta).loss.sum().backward()
        assert max(runs.values()) == 1 + checkpointed
        gradients.append(theta.grad)
    assert torch.equal(*gradients)


def cvt() -> nn.Module:
    """A model whose ``CvtSelfAttentionLinearProjection`` reshapes images [B, C, H, W] and has no weights."""
    sizes: dict[str, Any] = {
        "embed_dim": [8, 8, 16],
        "num_heads": [1, 1, 2],
        "depth": [1, 2, 3],
        "drop_rate": [0.0] * 3,
    }
    return CvtForImageClassification(CvtConfig(**sizes, num_labels=3))


def mobile_vit() -> nn.Module:
    """A model whose ``MobileViTV2LinearSelfAttention`` is made of several layers, which count the rows they see."""
    config = MobileViTV2Config(
        width_multiplier=0.25, image_size=64, n_attn_blocks=[1, 1, 1], base_attn_unit_dims=[32] * 3, num_labels=3
    )
    return MobileViTV2ForImageClassification(config)


@pytest.mark.parametrize(
    ("make", "subspace"),
    [(cvt, r"stages\.2\.layers\.[01]\.output"), (mobile_vit, r"encoder\.layer\.2.*convolution\.weight")],
)
def test_models_with_linear_in_their_class_names_train(make: Callable[[], nn.Module], subspace: str) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    layout = select(model, subspace)
    theta = scattered(model, layout)
    inputs = {"pixel_values": torch.randn(2, 3, 64, 64).double(), "labels": torch.tensor([0, 1])}
    _, expected = separate_gradients(model, layout, theta, [inputs] * len(theta))
    leaf = theta.clone().requires_grad_()
    with attach(model, theta, subspace=subspace) as bayesian:
        bayesian(**inputs, theta=leaf).loss.sum().backward()
    assert relative_error(leaf.grad, expected) < 1e-10


class GroupedLinear(nn.Linear):
    """DeepSeek-V4's layer: groups of features [..., groups, n] have a matrix each."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btgi,goi->btgo", x, self.weight.view(x.shape[2], -1, x.shape[3]))


class LinearWithoutFirstRow(nn.Linear):
    """A layer that fails on one row alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[[1, 0]]


class LinearRouter(nn.Linear):
    """A layer that returns the numbers of experts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class LinearAttention(nn.Linear):
    """A block of layers with a weight of its own, as those of KimiLinear."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.inner = nn.Linear(num_inputs, num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class LinearClamp(nn.Module):
    """A module without weights."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@pytest.mark.parametrize("kind", [GroupedLinear, LinearWithoutFirstRow, LinearRouter, LinearAttention, LinearClamp])
def test_layers_that_are_no_plain_linear_layers_are_let_be(kind: type[nn.Module]) -> None:
    model, shapes = nn.Sequential(kind(4, 6)), []
    guard(model)
    model[0].apply(lambda module: module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape)))
    model(torch.ones(2, 5, 3, 4).requires_grad_())
    assert shapes == [(2, 5, 3, 4)] * len(list(model[0].modules()))


def test_a_layer_is_checked_on_an_input_of_its_own_shape() -> None:
    class RoundingLinear(GroupedLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.round())

    model = nn.Sequential(RoundingLinear(4, 6))
    guard(model)
    with pytest.raises(ValueError, match="RoundingLinear"):
        model(torch.ones(2, 5, 3, 4).requires_grad_())


class LossyLinear(nn.Linear):
    """A layer without a gradient to its input, which takes two rows or more, and normalises them first."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.norm = nn.RMSNorm(num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise RuntimeError("needs two rows")
        return super().forward(self.norm(x).round())


def test_a_layer_that_takes_no_single_row_is_checked_on_all() -> None:
    model = nn.Sequential(LossyLinear(4, 6))
    guard(model)
    with pytest.raises(ValueError, match="LossyLinear"):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_())


def test_memory_that_runs_out_in_the_check_is_said() -> None:
    class LargeLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    model = nn.Sequential(LargeLinear(4, 6))
    guard(model)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(3, 4).requires_grad_())


def test_a_layer_that_gets_no_tokens_is_no_error() -> None:
    model = nn.Sequential(Int8WeightLinear(nn.Linear(4, 6)))
    guard(model)
    model(torch.ones(0, 4).requires_grad_())


# -- libraries that are no dependencies; `make test-slow` installs them ------------------------------------------------


def bits_and_bytes(**config: Any) -> Callable[[], Any]:
    return lambda: BitsAndBytesConfig(**config)


def int8_weights() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


BASES = {
    # without a threshold: columns of outliers are found over a whole batch, and a batch of all members has others
    "bitsandbytes 8 bit": bits_and_bytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes 4 bit": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes 4 bit twice": bits_and_bytes(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "torchao 8 bit": int8_weights,
}


def loaded(folder: Path, name: str) -> nn.Module:
    config = BASES[name]()
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return unpacked(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu"))


def unpacked(model: nn.Module) -> nn.Module:
    """Switch off the packing of 4-bit weights, which bitsandbytes does permanently in prediction with AVX512-BF16."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_lora_on_a_quantised_base_equals_separate_models(name: str, tmp_path: Path) -> None:
    require_equal_to_separate_models(with_lora(loaded(tmp_path, name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_what_is_quantised_cannot_be_random(name: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, name)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\..*weight is quantised \([\w.]+\) and cannot"):
        select(model, "last_block")
    assert select(model, "layernorm").names  # other layers may be random


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_chains_on_a_quantised_base_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = with_lora(loaded(tmp_path / "base", name))
    trainer = runs.trainer(tmp_path / "posterior", SGHMCConfig(num_chains=2), model=model, max_steps=2)
    trainer.train()
    trainer.save_model()
    theta = trainer.posterior.sample(None)
    plain = trainer.bayesian.detach().eval()  # bitsandbytes rounds activations to 8 bits on CPUs, but not in training
    expected = mixture(separate_logits(plain, select(plain, "lora_"), theta, batch()))
    again = type(trainer.bayesian).from_pretrained(tmp_path / "posterior")
    unpacked(again)
    with torch.no_grad():
        assert relative_error(again(**batch()).logits, expected) < TOLERANCE
    assert str(core_of(again.model)) == str(core_of(plain))
