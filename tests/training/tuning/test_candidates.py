"""The methods that a tuning compares."""

from __future__ import annotations

from hf_bayes import LaplaceConfig, attach
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.base import BayesianModel
from hf_bayes.training.tuning.candidates import PLAIN, default_candidates
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

OF_LORA = {"mc_dropout", "blob", "training_free"}


def test_candidates_have_own_names_and_plain_comes_first() -> None:
    rows = default_candidates(attach(with_lora(tiny_llama())))
    assert len({row.name for row in rows}) == len(rows)
    assert rows[0].name == PLAIN
    methods = {row.method.name for row in rows}
    assert methods == {"map", "ensemble", "mean_field", "ivon", "sghmc", "swa", "swag", "laplace", *OF_LORA}
    assert methods <= set(METHODS)


def test_without_lora_its_methods_are_left_out() -> None:
    model = attach(tiny_bert(), subspace="last_layer")
    assert not OF_LORA & {row.method.name for row in default_candidates(model)}


def test_with_many_classes_nothing_is_linearised() -> None:
    found = {count: _names(attach(tiny_bert(num_labels=count), subspace="last_layer")) for count in (32, 33)}
    assert "Laplace, linearised" in found[32]
    assert found[33] == [name for name in found[32] if name != "Laplace, linearised"]


def test_a_likelihood_without_draws_has_an_empirical_laplace() -> None:
    found = {}
    for likelihood in (Heteroscedastic(), Weighted(Heteroscedastic())):
        rows = default_candidates(attach(tiny_bert(num_labels=2), subspace="last_layer", likelihood=likelihood))
        (laplace,) = [row.method for row in rows if isinstance(row.method, LaplaceConfig)]
        found[likelihood.name] = laplace.estimator
    assert found == {"heteroscedastic": "ggn", "weighted": "ef_sequence"}


def _names(model: BayesianModel) -> list[str]:
    return [row.name for row in default_candidates(model)]
