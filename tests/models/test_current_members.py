from __future__ import annotations

import pytest
import torch

from hf_bayes.models.attaching import attach
from tests.members.reference import mixture, relative_error, separate_logits
from tests.models.prepared import prepared
from tests.tiny_models import batch, tiny_llama, with_lora


def test_shown_members_answer_in_place_of_the_parameter() -> None:
    model, layout, theta, subspace = prepared("llama-lora", num_members=4)
    with torch.no_grad(), attach(model, theta[:2], subspace=subspace) as bayesian:
        bayesian.show(theta[2:])
        found = bayesian(**batch()).logits
        assert bayesian.num_members == 2
        bayesian.show(None)
        other = bayesian(**batch()).logits
    assert relative_error(found, mixture(separate_logits(model, layout, theta[2:], batch()))) < 1e-12
    assert relative_error(other, found) > 0.01


def test_members_cannot_be_spread_without_launched_processes() -> None:
    with attach(with_lora(tiny_llama())) as model, pytest.raises(ValueError, match="start it with accelerate launch"):
        model.spread_members()
