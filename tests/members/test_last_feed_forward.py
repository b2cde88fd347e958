from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.models.attaching import attach
from tests.members.subjects import CAUSAL
from tests.models.prepared import prepared
from tests.tiny_models import batch, tiny_llama

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
        assert set(positions) == {1}
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
    assert positions == [1] * 7  # a look at one token, and three members twice
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
