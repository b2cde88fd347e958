"""The methods that a tuning compares."""

from __future__ import annotations

import pytest

from hf_bayes import attach
from hf_bayes.methods.registry import METHODS
from hf_bayes.training.tuning.candidates import PLAIN, default_candidates, wider_prior
from tests.tiny_models import tiny_bert, tiny_llama, with_lora


def test_candidates_have_names_of_their_own_and_plain_comes_first() -> None:
    rows = default_candidates(attach(with_lora(tiny_llama())))
    assert len({row.name for row in rows}) == len(rows)
    assert rows[0].name == PLAIN
    methods = {row.method.name for row in rows}
    assert methods == {"map", "ensemble", "mean_field", "sghmc", "swa", "swag", "laplace", "mc_dropout"}
    assert methods <= set(METHODS)


def test_a_wider_prior_widens_everything_but_a() -> None:
    model = attach(with_lora(tiny_llama()))
    narrow, wide = wider_prior(model, 1.0), wider_prior(model, 4.0)
    for pattern in narrow:
        factor = 1 if "lora_A" in pattern else 4
        assert wide[pattern] == pytest.approx(factor * narrow[pattern])


def test_without_lora_there_is_one_prior_and_no_dropout() -> None:
    model = attach(tiny_bert(), subspace="last_layer")
    assert wider_prior(model, 4.0) is None
    names = [row.name for row in default_candidates(model)]
    assert not any("wide" in name or "dropout" in name for name in names)
