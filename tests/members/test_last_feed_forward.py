from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, InklingForCausalLM, InklingTextConfig, PreTrainedModel

from hf_bayes.core.layout import select
from hf_bayes.members.last_feed_forward import CHECKED_POSITIONS
from hf_bayes.models.attaching import attach
from tests import tiny_models as models
from tests.members.reference import scattered
from tests.members.subjects import CAUSAL
from tests.models.prepared import prepared
from tests.models.written import generate
from tests.tiny_models import VOCABULARY, batch, tiny_llama

WHOLE_TAIL = ("jamba", "granitemoehybrid", "bloom", "mpt", "opt", "bart", "marian")
"""Blocks that call their feed-forward by another name, or hand it the residual: all positions are computed."""


@pytest.mark.parametrize("name", CAUSAL)
def test_last_logits_run_the_last_feed_forward_at_one_position(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole = bayesian(**batch(), use_cache=True)
        positions: list[int] = []
        feed_forward = bayesian.members.last_feed_forward.module or nn.Identity()
        handle = feed_forward.register_forward_pre_hook(lambda module, args: positions.append(args[0].shape[1]))
        kept = bayesian(**batch(), use_cache=True, logits_to_keep=1)
        handle.remove()
    if not name.startswith(WHOLE_TAIL):
        assert (positions[0], set(positions[1:])) == (CHECKED_POSITIONS, {1})
    torch.testing.assert_close(kept.logits, whole.logits[:, -1:], rtol=1e-12, atol=1e-12)
    for a, b in zip(kept.past_key_values.layers, whole.past_key_values.layers, strict=True):
        if hasattr(a, "keys"):
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(a.values, b.values, rtol=1e-12, atol=1e-12)


def test_several_passes_also_compute_only_the_last_position() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    positions: list[int] = []
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = 1
        bayesian.members.last_feed_forward.module.register_forward_pre_hook(
            lambda module, args: positions.append(args[0].shape[1])
        )
        first, second = (bayesian(**batch(), logits_to_keep=1).logits for _ in range(2))
    assert positions == [CHECKED_POSITIONS, 1] + [1] * 6  # the check, and three members twice
    assert torch.equal(first, second)


def test_a_last_block_that_runs_twice_is_not_cut() -> None:
    model = tiny_llama(dtype=torch.float64)
    model.model.layers[-2] = model.model.layers[-1]
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        whole = bayesian(**batch(), use_cache=False)
        for _ in range(2):
            kept = bayesian(**batch(), use_cache=False, logits_to_keep=1)
            torch.testing.assert_close(kept.logits, whole.logits[:, -1:], rtol=1e-12, atol=1e-12)


def test_a_failed_feed_forward_leaves_the_next_forward_whole() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    shorter = {name: value[:, 2:] for name, value in batch().items()}
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole = bayesian(**shorter)
        act = bayesian.members.last_feed_forward.module.act_fn
        act.forward = lambda x: (_ for _ in ()).throw(MemoryError)  # between the hooks
        with pytest.raises(MemoryError):
            bayesian(**batch(), logits_to_keep=1)
        del act.forward
        assert torch.equal(bayesian(**shorter).logits, whole.logits)


def inkling() -> PreTrainedModel:
    """A model with a convolution over positions behind the feed-forward module."""
    config = InklingTextConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=8, rel_extent=32, d_rel=4,
        layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "dense"], intermediate_size=24,
        moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return InklingForCausalLM(config)


def deepseek() -> PreTrainedModel:
    """A model whose feed-forward module also takes ``input_ids``, at all positions."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        head_dim=8, q_lora_rank=4, num_experts_per_tok=1, n_routed_experts=2, mlp_layer_types=["moe", "hash_moe"],
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"], hc_mult=2, o_groups=2,
        o_lora_rank=4, index_n_heads=2, index_head_dim=8, index_topk=4, partial_rotary_factor=0.5, pad_token_id=0,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "subspace"), [(inkling, r"1\.self_attn\.q_proj"), (deepseek, r"1\.self_attn\.q_b_proj")]
)
def test_a_feed_forward_of_other_positions_is_whole(make: Callable[[], PreTrainedModel], subspace: str) -> None:
    model = models._build(make, 0, torch.float64)
    model.set_experts_implementation("eager")  # the other ones have no float64
    theta = scattered(model, select(model, subspace))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole = bayesian(**batch()).logits[:, -1:]
        assert torch.equal(bayesian(**batch(), logits_to_keep=1).logits, whole)
        prompt = batch(1, 9)
        found = generate(bayesian, prompt, max_new_tokens=2, eos_token_id=None)
        scored = bayesian.score(found.sequences, first=9)
    torch.testing.assert_close(found.logprobs, scored.logprobs, rtol=0, atol=1e-6)  # caches of DeepSeek-V4: float32


class PreviousPosition(nn.Module):
    """A norm that adds the hidden states of the position before."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.scale * x.roll(1, 1))


def test_no_other_position_is_read_by_however_little() -> None:
    """Rounding of bfloat16 is larger than what the other position adds."""
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.norm = PreviousPosition(model.model.norm, 1e-3)
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        bayesian(**batch(), logits_to_keep=1)
        assert bayesian.members.last_feed_forward.is_exact is False


def test_the_check_draws_no_random_numbers() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        before = torch.get_rng_state()
        bayesian.train()(**batch(), logits_to_keep=1)
        assert bayesian.members.last_feed_forward.is_exact
        assert torch.equal(torch.get_rng_state(), before)


def test_a_check_that_fails_leaves_the_feed_forward_whole() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        last = bayesian.members.last_feed_forward
        outputs = iter([(torch.zeros(1, CHECKED_POSITIONS, 4), None)])

        def forward() -> tuple[Tensor, None]:
            last._calls = 1
            return next(outputs)

        with pytest.raises(StopIteration):
            last.count_calls(forward)
        whole = bayesian(**batch()).logits[:, -1:]
        assert torch.equal(bayesian(**batch(), logits_to_keep=1).logits, whole)
    assert not last.is_exact
