from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes.core.layout import Layout, decoder_blocks, grouped, initial, modules_of, select
from tests.members.subject_models import roberta
from tests.tiny_models import VOCABULARY, tiny_bert, tiny_gpt2, tiny_llama, with_lora

LAYOUT = Layout(("a", "b", "scalar"), ((2, 3), (4,), ()))


def test_flatten_and_unflatten_are_inverse() -> None:
    theta = torch.randn(5, LAYOUT.dim)
    tensors = LAYOUT.unflatten(theta)
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "a": (5, 2, 3),
        "b": (5, 4),
        "scalar": (5,),
    }
    assert torch.equal(LAYOUT.flatten(tensors), theta)
    assert torch.equal(LAYOUT.flatten(LAYOUT.unflatten(theta[0])), theta[0])


def test_unflatten_gives_views_whose_gradient_is_theta_shaped() -> None:
    theta = torch.randn(5, LAYOUT.dim, requires_grad=True)
    tensors = LAYOUT.unflatten(theta)
    assert tensors["a"].data_ptr() == theta.data_ptr()
    tensors["b"].sum().backward()
    assert theta.grad is not None
    assert theta.grad.sum() == 5 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, r"missing \['b'\], unknown \[\]"),
        ({"c": torch.zeros(5, 1)}, r"missing \[\], unknown \['c'\]"),
        ({"b": torch.zeros(5, 3)}, r"b: expected shape \[5, 4\], got \[5, 3\]"),
        ({"b": torch.zeros(4, 4)}, r"b: expected shape \[5, 4\], got \[4, 4\]"),
    ],
    ids=["missing", "unknown", "shape", "members"],
)
def test_flatten_refuses_by_name(change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {**LAYOUT.unflatten(torch.zeros(5, LAYOUT.dim)), **change}
    with pytest.raises(ValueError, match=message):
        LAYOUT.flatten({name: value for name, value in tensors.items() if value is not None})


def test_unflatten_refuses_another_width() -> None:
    with pytest.raises(ValueError, match=r"theta must have 11 columns \(3 tensors\), got 12"):
        LAYOUT.unflatten(torch.zeros(5, 12))


@pytest.mark.parametrize(
    ("make", "subspace", "expected"),
    [
        (tiny_llama, "last_layer", {"lm_head.weight"}),
        (lambda: tiny_llama(tie_word_embeddings=True), "last_layer", {"model.embed_tokens.weight"}),
        (tiny_gpt2, "last_layer", {"transformer.wte.weight"}),
        (tiny_bert, "last_layer", {"classifier.weight", "classifier.bias"}),
        (tiny_llama, r"model\.norm", {"model.norm.weight"}),
        (tiny_gpt2, "lm_head", {"lm_head.weight"}),
    ],
    ids=["untied", "tied", "gpt2", "bert", "expression", "a tied name"],
)
def test_words_and_expressions_select_parameters(
    make: Callable[[], nn.Module], subspace: str, expected: set[str]
) -> None:
    assert set(select(make(), subspace).names) == expected


def test_the_head_of_roberta_is_the_last_layer() -> None:
    names = select(roberta(torch.float32), "last_layer").names
    assert {name.rsplit(".", 1)[0] for name in names} == {"classifier.dense", "classifier.out_proj"}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_bert], ids=["llama", "gpt2", "bert"])
def test_the_last_block_is_all_of_the_last_block(make: Callable[[], nn.Module]) -> None:
    model = make()
    name, blocks = decoder_blocks(model)
    expected = {f"{name}.1.{inner}" for inner, _ in blocks[1].named_parameters()}
    assert set(select(model, "last_block").names) == expected


def test_trainable_means_what_peft_made_trainable() -> None:
    model = with_lora(tiny_bert(), modules_to_save=["classifier"])
    layout = select(model)
    assert {".lora_" in name or ".modules_to_save." in name for name in layout.names} == {True}
    assert len(layout.names) == 2 * 2 * 2 + 2  # A and B on query and value of two blocks; weight and bias of the head


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert, lambda: with_lora(tiny_llama()).requires_grad_(True)])
def test_a_base_with_nothing_frozen_needs_an_explicit_all(make: Callable[[], nn.Module]) -> None:
    model = make()
    number = sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match=rf"would sample all {number:,} weights .* Add LoRA .* set subspace='all'"):
        select(model)
    assert select(model, "all").dim == number


def test_what_the_caller_froze_is_an_explicit_choice() -> None:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    assert set(select(model).names) == {n for n, _ in model.named_parameters()} - {"model.embed_tokens.weight"}


def test_weights_that_nobody_froze_by_hand_are_no_choice() -> None:
    model = tiny_bert()
    model.bert.embeddings.position_embeddings.requires_grad_(False)  # as classes with sinusoidal tables do
    packed = nn.Parameter(model.classifier.weight.detach().to(torch.int8), requires_grad=False)
    model.classifier.weight = packed  # as quantisation does
    with pytest.raises(ValueError, match="none of them is frozen"):
        select(model)


def test_all_leaves_out_the_originals_that_peft_keeps_aside() -> None:
    names = select(with_lora(tiny_llama(), modules_to_save=["lm_head"]), "all").names
    assert "base_model.model.lm_head.modules_to_save.default.weight" in names
    assert not [name for name in names if "original_module" in name]


@pytest.mark.parametrize("subspace", ["", None, ["lm_head"]], ids=str)
def test_a_subspace_that_is_no_text_or_empty_is_refused(subspace: Any) -> None:
    with pytest.raises(ValueError, match=r'^subspace must be .*"all" or a regular expression'):
        select(tiny_llama(), subspace)


def test_names_are_grouped_over_layers_and_the_rest_counted() -> None:
    names = select(with_lora(tiny_llama())).names  # A and B on three modules of two layers
    first = "2 x model.layers.*.self_attn.q_proj.lora_A.default.weight"
    assert grouped(names).startswith(first)
    assert grouped(names).count(" x ") == 3
    assert grouped(names).endswith("and 6 more")
    assert grouped(["lm_head.weight"]) == "lm_head.weight"


def test_the_last_layer_of_peft_is_the_copy_that_is_used() -> None:
    names = select(with_lora(tiny_llama(), modules_to_save=["lm_head"]), "last_layer").names
    assert names == ("base_model.model.lm_head.modules_to_save.default.weight",)


def test_tied_weights_are_one_entry_under_the_first_name() -> None:
    layout = select(tiny_gpt2(), ".")
    assert layout.names.count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in layout.names
    assert sum(size == VOCABULARY * 16 for size in layout.sizes) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_parameters_are_refused_by_name(dtype: torch.dtype) -> None:
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=rf"lm_head.weight is quantised \({dtype}\) and cannot be random"):
        select(model, "last_layer")
    select(model, "last_block")  # elsewhere it may stay


def test_four_bit_parameters_are_refused_at_any_dtype() -> None:
    model = tiny_llama()
    model.lm_head.weight.quant_state = object()  # bitsandbytes may pack four bits into bfloat16
    with pytest.raises(ValueError, match=r"lm_head\.weight is quantised"):
        select(model, "last_layer")


def test_packed_tensors_are_refused_at_any_dtype() -> None:
    class Packed(torch.Tensor):
        """A weight in torchao's storage format."""

    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed), requires_grad=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight is quantised \(Packed\) and cannot be random"):
        select(model, "last_layer")


@pytest.mark.parametrize(
    ("subspace", "message"),
    [
        ("nowhere", "subspace='nowhere' selects 0 parameters to sample"),
        ("trainable", "subspace='trainable' selects 0 parameters to sample"),
        ("(", r"subspace='\(' is neither a known word nor a regular expression"),
    ],
)
def test_an_empty_selection_is_refused(subspace: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(tiny_llama().requires_grad_(False), subspace)


@pytest.mark.parametrize(
    ("subspace", "message"), [("last_layer", "no output head"), ("last_block", "no list of blocks")]
)
def test_words_without_meaning_for_a_module_are_refused(subspace: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"Sequential has {message}"):
        select(nn.Sequential(nn.Linear(2, 2)), subspace)


def test_experts_inside_a_block_are_not_the_blocks() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    model = nn.Module()
    model.layers = nn.ModuleList(Expert() for _ in range(3))
    found = decoder_blocks(model)
    assert found is not None
    assert found[0] == "layers"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_chains_start_at_the_models_values_in_float32_or_better(stored: torch.dtype, expected: torch.dtype) -> None:
    model = tiny_llama(dtype=stored)
    layout = select(model, "last_layer")
    start = initial(model, layout)
    assert start.dtype == expected
    assert torch.equal(start, model.lm_head.weight.detach().flatten().to(expected))


def test_modules_of_a_class_are_found_once_by_their_first_path() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)))
    model.append(model[0])
    assert modules_of(model, nn.Linear) == {"0": model[0]}
    assert list(modules_of(model, nn.LayerNorm)) == ["1.0"]


def test_a_column_has_the_name_of_the_tensor_that_holds_it() -> None:
    layout = Layout(("scale", "empty", "weight"), ((), (0, 2), (2, 2)))
    assert [layout.name_at(column) for column in range(layout.dim)] == ["scale", *["weight"] * 4]
