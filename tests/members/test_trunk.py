from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from hf_bayes.core.layout import Layout, select
from hf_bayes.members import Members
from hf_bayes.members.trunk import TrunkMemory
from hf_bayes.models.attaching import attach
from tests import tiny_models as models
from tests.members.reference import core_of, mixture, relative_error, scattered, separate_logits
from tests.members.subjects import SUBJECTS, labelled
from tests.members.trunk_runs import LAST_BLOCK, Calls
from tests.tiny_models import VOCABULARY, batch, tiny_bert, tiny_gpt2, tiny_llama, with_lora


def words(value: object) -> str | None:
    """Return the test id of a parameter; conftest names functions."""
    return None if callable(value) else str(value)


def engine_of(model: nn.Module, subspace: str = "trainable", num_members: int = 4) -> tuple[Members, Layout, Tensor]:
    layout = select(model, subspace)
    return Members(model, core_of(model), layout), layout, scattered(model, layout, num_members)


def rows_seen(engine: Members, theta: Tensor, inputs: dict[str, Tensor], suffix: str) -> dict[str, int]:
    """Return the rows that reach each module whose path ends in ``suffix``, in one forward of all members."""
    seen: dict[str, int] = {}
    for path, module in engine.core.named_modules():
        if path.endswith(suffix):
            module.register_forward_hook(lambda _, args, __, path=path: seen.__setitem__(path, args[0].shape[0]))
    engine.install()
    with torch.no_grad(), engine.bind(theta):
        engine.forward(inputs)
    engine.remove()
    return seen


@pytest.mark.parametrize(
    ("make", "subspace", "norm", "trunk"),
    [
        (
            lambda: with_lora(tiny_llama(num_hidden_layers=4), layers_to_transform=[2, 3]),
            "trainable",
            "input_layernorm",
            2,
        ),
        (lambda: tiny_llama(num_hidden_layers=4), "last_block", "input_layernorm", 3),
        (lambda: tiny_llama(num_hidden_layers=4), "last_layer", "input_layernorm", 4),
        (lambda: tiny_llama(num_hidden_layers=4), r"layers\.0\.", "input_layernorm", 0),
        (lambda: tiny_llama(num_hidden_layers=4), r"embed|layers\.3", "input_layernorm", 0),
        (lambda: tiny_gpt2(n_layer=3), "last_block", "ln_1", 2),
        (lambda: tiny_gpt2(n_layer=3), "last_layer", "ln_1", 0),  # tied to the embedding, which comes first
        (lambda: tiny_bert(num_hidden_layers=3), "last_block", "attention.self.query", 2),
        (lambda: tiny_bert(num_hidden_layers=3), "classifier", "attention.self.query", 3),
    ],
    ids=words,
)
def test_trunk_runs_once_for_all_members(make: Callable[[], nn.Module], subspace: str, norm: str, trunk: int) -> None:
    engine, _, theta = engine_of(make(), subspace)
    seen = rows_seen(engine, theta, batch(3), norm)
    assert engine.num_trunk_blocks == trunk
    assert list(seen.values()) == [3] * trunk + [12] * (len(seen) - trunk)


def test_frozen_projections_of_the_first_random_block_run_once() -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    model = with_lora(tiny_llama(num_hidden_layers=3), target_modules=targets, layers_to_transform=[1, 2])
    engine, _, theta = engine_of(model)
    seen = {path: rows for path, rows in rows_seen(engine, theta, batch(3), "base_layer").items()}
    first = {path.split(".")[-2] for path, rows in seen.items() if ".layers.1." in path and rows == 3}
    assert first == {"q_proj", "k_proj", "v_proj"}
    assert all(rows == 12 for path, rows in seen.items() if ".layers.2." in path)


def test_mixture_is_the_same_without_the_trunk() -> None:
    model = SUBJECTS["llama-last-block"].make(torch.float64)
    theta = scattered(model, select(model, "last_block"))
    logits = []
    for trunk in (True, False):
        with torch.no_grad(), attach(model, theta, subspace="last_block", trunk=trunk) as bayesian:
            logits.append(bayesian(**batch()).logits)
    assert relative_error(logits[0], logits[1]) < 1e-13  # rounding of float64, a hundred sums deep


def test_backward_stops_where_the_trunk_ends() -> None:
    model = with_lora(tiny_llama(num_hidden_layers=3), layers_to_transform=[2])
    core_of(
        model
    ).enable_input_require_grads()  # as the documentation of transformers recommends for peft with checkpointing
    reached: list[int] = []
    core_of(model).model.layers[1].register_full_backward_hook(lambda *_: reached.append(1))
    with attach(model, num_members=2) as bayesian:
        leaf = bayesian.theta.detach().requires_grad_()
        bayesian(**labelled("llama-lora"), theta=leaf).loss.sum().backward()
    assert leaf.grad.abs().max() > 0
    assert not reached


@pytest.mark.parametrize("head", ["last_layer", "trainable"])
def test_embeddings_that_require_grad_change_no_gradient(head: str) -> None:
    model = tiny_llama() if head == "last_layer" else with_lora(tiny_llama(), layers_to_transform=[1])
    gradients = []
    for _ in range(2):
        with attach(model, subspace=head, num_members=2) as bayesian:
            leaf = bayesian.theta.detach().requires_grad_()
            bayesian(**labelled("llama-lora"), theta=leaf).loss.sum().backward()
        gradients.append(leaf.grad)
        core_of(model).enable_input_require_grads()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("config", [{"attention_dropout": 0.1}, {}], ids=str)
def test_dropout_in_functions_counts_as_dropout(config: dict[str, float]) -> None:
    engine, *_ = engine_of(tiny_llama(**config), "last_block")
    assert engine.trunk.has_dropout == bool(config)


@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_noise_of_a_router_counts_as_dropout(noise: float) -> None:
    engine, *_ = engine_of(mixtral(router_jitter_noise=noise), r"layers\.2\.self_attn")
    assert engine.trunk.has_dropout == bool(noise)


def test_dropout_that_no_causal_model_applies_does_not_count() -> None:
    assert tiny_gpt2().config.summary_first_dropout > 0
    engine, *_ = engine_of(tiny_gpt2(), "last_block")
    assert not engine.trunk.has_dropout


# -- models whose blocks take more than states, masks and positions --------------------------------------------------


def bloom() -> nn.Module:
    """Return a model whose blocks take biases of rows x heads."""
    fields = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=3, n_head=2, pad_token_id=0, **fields)
    return models._build(lambda: BloomForCausalLM(config), 0, torch.float64)


def deberta(**fields: object) -> nn.Module:
    """Return a model whose blocks take a table of 2 * position_buckets distances: as many as the rows of 3 members."""
    config = DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True, position_buckets=3,
        max_position_embeddings=32, pos_att_type=["p2c", "c2p"], num_labels=3, **fields,
    )  # fmt: skip
    return models._build(lambda: DebertaV2ForSequenceClassification(config), 0, torch.float64)


@pytest.mark.parametrize(
    ("make", "subspace", "trunk"), [(bloom, "last_block", 0), (deberta, r"layer\.2\.output", 2)], ids=words
)
def test_other_tensors_of_as_many_rows_are_not_cut(make: Callable[[], nn.Module], subspace: str, trunk: int) -> None:
    model = make()
    layout = select(model, subspace)
    theta = scattered(model, layout)
    inputs = batch(2)
    expected = (
        separate_logits(model, layout, theta, inputs) if make is bloom else _without_cache(model, layout, theta, inputs)
    )
    engine = Members(model, model, layout)
    engine.install()
    with torch.no_grad(), engine.bind(theta):
        found = engine.forward(inputs).logits.unflatten(0, (3, -1))
    assert engine.num_trunk_blocks == trunk
    assert relative_error(found, expected) < 1e-13


def _without_cache(model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    forward = model.forward
    model.forward = lambda use_cache, **inputs: forward(**inputs)  # DeBERTa has no cache
    try:
        return separate_logits(model, layout, theta, inputs)
    finally:
        del model.forward


@pytest.mark.parametrize(
    ("subspace", "rows"), [(r"encoder\.LayerNorm", 6), (r"layer\.2\.attention\.self\.pos_key_proj", 1)], ids=str
)
def test_modules_that_read_a_table_are_refused_by_name(subspace: str, rows: int) -> None:
    engine, layout, theta = engine_of(deberta(norm_rel_ebd="layer_norm"), subspace, num_members=3)
    engine.install()
    with engine.bind(theta), pytest.raises(ValueError, match=f"{layout.names[0]}: .* with {rows} rows, expected 9"):
        engine.forward(batch(3))


def mixtral(**changes: Any) -> nn.Module:
    config = MixtralConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                           num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **changes)  # fmt: skip
    return models._build(lambda: MixtralForCausalLM(config), 0, torch.float32)  # its kernel has no float64


def test_attention_is_random_among_frozen_experts() -> None:
    model, subspace = mixtral(), r"layers\.2\.self_attn"
    layout = select(model, subspace)
    theta = scattered(model, layout)
    expected = mixture(separate_logits(model, layout, theta, batch()))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        assert relative_error(bayesian(**batch()).logits, expected) < 1e-5  # float32, a hundred sums deep
        assert bayesian.members.num_trunk_blocks == 2


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers.2.mlp.gate .*MixtralTopKRouter.* not supported as random"):
        attach(mixtral(), subspace="last_block")


def test_rows_that_cannot_be_dealt_to_members_are_refused() -> None:
    engine, _, theta = engine_of(tiny_llama(), "last_block")
    engine.install()
    with engine.bind(theta), pytest.raises(ValueError, match="6 rows cannot be divided among 4 members"):
        engine.forward(batch(6), folded=True)


# -- once for several passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAST_BLOCK)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_in_several_passes_share_one_run_of_the_trunk(kind: str, size: int) -> None:
    make, path = LAST_BLOCK[kind]
    model = make(dtype=torch.float64)
    layout = select(model, "last_block")
    theta = scattered(model, layout, 4)
    inputs = batch()
    with torch.no_grad(), attach(model, theta, subspace="last_block") as bayesian:
        whole = bayesian(**inputs).logits
        bayesian.members_per_pass = size
        calls = Calls(model.get_submodule(path))
        pieces = bayesian(**inputs).logits
        assert calls.count == 1
        other = batch(seed=1)
        again = bayesian(**other).logits  # nothing is kept of the earlier rows
        bayesian.members_per_pass = None
        torch.testing.assert_close(again, bayesian(**other).logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("subspace", [r"layer\.1\.", "last_layer"])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_blocks_that_come_round_again_run_again(size: int | None, subspace: str) -> None:
    """Check a block of the trunk that is called again after a random block, with the rows of all members."""
    model = tiny_bert(dtype=torch.float64)
    encoder = model.bert.encoder

    def twice(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> object:
        for block in [*encoder.layer, *encoder.layer]:
            hidden_states = block(hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)

    encoder.forward = twice
    layout = select(model, subspace)
    theta = scattered(model, layout, 4)
    expected = mixture(separate_logits(model, layout, theta, batch()))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = size
        assert bayesian.members.num_trunk_blocks > 0
        assert relative_error(bayesian(**batch()).logits, expected) < 1e-13


def test_memory_keeps_nothing_of_blocks_that_run_again() -> None:
    model = SUBJECTS["albert-head"].make(torch.float64)
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        trunk = bayesian.members.trunk
        trunk.memory = TrunkMemory(1e9)
        with trunk.run_once(batch()), bayesian.members.bind(bayesian.theta):
            bayesian.members.forward(batch())
    assert not trunk.memory.rows


def test_generation_in_passes_keeps_the_cache_of_one_trunk_run() -> None:
    model = tiny_llama(dtype=torch.float64)
    layout = select(model, "last_block")
    theta = scattered(model, layout, 4)
    found = []
    for size in (None, 1):
        with attach(model, theta, subspace="last_block") as bayesian:
            bayesian.members_per_pass = size
            found.append(bayesian.generate(**batch(padding="left"), max_new_tokens=5, num_beams=2))
    assert torch.equal(*found)


def test_the_trunk_runs_once_when_only_the_head_is_random() -> None:
    model = tiny_gpt2(tie_word_embeddings=False)
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=4) as bayesian:
        bayesian.members_per_pass = 1
        calls = Calls(model.transformer.h[0].attn)
        bayesian(**batch())
    assert calls.count == 1
