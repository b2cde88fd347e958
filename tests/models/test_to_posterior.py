from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes import LaplaceConfig, MeanFieldConfig, SWAGConfig, attach
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.to_posterior import _fitted_prior, refuse_unsavable, to_posterior
from hf_bayes.posteriors.sidecars import Sidecars
from tests import tiny_models as models
from tests.models.linear_cases import lora_bert, tagger
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora


def test_only_laplace_with_few_outputs_predicts_linearised() -> None:
    def stored(model: BayesianModel, method: MethodConfig) -> str:
        gaussian = Gaussian.diagonal(model.theta.detach()[:1], torch.ones_like(model.theta[:1]))
        options: dict[str, Any] = {"subspace": "trainable", "num_data": 1.0, "data_unit": "token", "tokenizer": None}
        return to_posterior(model, gaussian, method, seed=0, diagnostics={}, **options).config.prediction

    with attach(lora_bert()) as bayesian:
        found = {config.name: stored(bayesian, config) for config in (LaplaceConfig(), MeanFieldConfig(), SWAGConfig())}
    assert found == {"laplace": "linearised", "mean_field": "members", "swag": "members"}
    with attach(with_lora(models.tiny_llama())) as words, attach(tagger(), subspace="all") as tags:
        assert [stored(words, LaplaceConfig()), stored(tags, LaplaceConfig())] == ["members", "members"]


@pytest.mark.parametrize(
    ("scope", "precision", "std"),
    [("model", 4.0, 0.5), ("tensor", [4.0], {"w": 0.5}),
     ("element", [1.0, 4.0, 16.0], {"largest": 1.0, "median": 0.5, "smallest": 0.25})],
)  # fmt: skip
def test_the_fitted_prior_is_recorded(scope: str, precision: Any, std: Any) -> None:
    method = LaplaceConfig(fit_prior="evidence", prior_scope=scope)
    layout = Layout(("w",), ((3,),))
    found = _fitted_prior(method, layout, {"laplace": [{"prior_precision": precision}]})
    assert found == {"name": "gaussian", "std": std, "mean": "zero", "fitted_by": "evidence", "scope": scope}
    assert _fitted_prior(method, layout, {"converged": None}) is None


def test_a_fit_by_evidence_records_its_prior() -> None:
    posterior = fit_laplace(
        tiny_llama(), token_rows(2), LaplaceConfig(fit_prior="evidence", prior_std=0.8), subspace="last_layer"
    )
    precision = posterior.config.diagnostics["laplace"][0]["prior_precision"]
    assert posterior.config.prior["std"] == pytest.approx(precision**-0.5)


def _named(name: str) -> Any:
    model = models.tiny_llama()
    model.config._name_or_path = name
    return with_lora(model)


def _labelled(names: Any) -> Any:
    model = models.tiny_bert()
    model.config.id2label = names
    return with_lora(model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_lora(models.tiny_llama(), lora_alpha=0), "lora_alpha must be a number > 0, got 0"),
        (lambda: _labelled({1: "a", 2: "b", 3: "c"}), r"the keys \[1, 2, 3\]"),
        (lambda: _named("a\nb"), "name_or_path must be a line of text"),
        (lambda: with_lora(models.tiny_bert(problem_type="ranking")), "problem_type of the posterior's head is"),
    ],
    ids=["adapter", "labels", "name", "problem"],
)
def test_a_model_that_no_posterior_holds_is_refused(make: Any, words: str) -> None:
    with attach(make()) as model, pytest.raises(ValueError, match=words):
        refuse_unsavable(model, LaplaceConfig(), subspace="trainable", tokenizer=None)


def test_the_check_of_a_model_makes_its_posterior_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("hf_bayes.models.to_posterior.Posterior", lambda **parts: made.append(parts))
    with attach(lora_bert()) as model:
        before = model.theta.detach().clone()
        known = Sidecars()
        refuse_unsavable(model, LaplaceConfig(), subspace="trainable", tokenizer=None, sidecars=known)
        assert torch.equal(model.theta, before)
    assert [parts["sidecars"] is known for parts in made] == [True]
