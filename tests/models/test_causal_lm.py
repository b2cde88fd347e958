from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.models.attaching import attach
from tests.members.subjects import CAUSAL
from tests.models.prepared import prepared
from tests.tiny_models import batch


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_to_keep_are_those_of_the_whole(name: str, keep: int | Tensor) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole, kept = bayesian(**batch()), bayesian(**batch(), logits_to_keep=keep)
    positions = keep if isinstance(keep, Tensor) else slice(-keep, None)
    torch.testing.assert_close(kept.logits, whole.logits[:, positions], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept.epistemic, whole.epistemic[:, positions], rtol=1e-10, atol=1e-12)


def test_a_forward_in_passes_returns_a_cache_only_on_request() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = 1
        assert bayesian(**batch()).past_key_values is None
        cache = bayesian(**batch(), use_cache=True).past_key_values
    assert [layer.keys.shape[0] for layer in cache.layers] == [3, 3, 9]
