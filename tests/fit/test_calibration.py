"""A temperature for the mixture of a finished posterior."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, BayesianModelForSequenceClassification, Posterior, fit_calibration
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from tests import runs
from tests.models.test_calibrating import batches
from tests.posteriors.test_abstention import RULE
from tests.tiny_models import batch, tiny_bert, tiny_llama

ROWS = [{"labels" if name == "label" else name: v for name, v in row.items()} for row in runs.label_rows(80, seed=5)]


@pytest.fixture(scope="module")
def over_confident(tmp_path_factory: pytest.TempPathFactory) -> Posterior:
    """An ensemble that has learnt ten random labels by heart."""
    trainer = runs.trainer(
        tmp_path_factory.mktemp("run"), EnsembleConfig(num_chains=3, prior_std=3.0), model=tiny_bert(),
        subspace="last_layer", train=runs.label_rows(10), max_steps=60, learning_rate=0.3,
    )  # fmt: skip
    trainer.train()
    return trainer.posterior


def load(posterior, **changes):
    return BayesianModelForSequenceClassification.from_pretrained(posterior, base_model=tiny_bert(), **changes)


def test_a_stored_temperature_is_used_by_what_is_loaded(over_confident: Posterior, tmp_path: Path) -> None:
    fit_calibration(over_confident, ROWS, base_model=tiny_bert()).save_pretrained(tmp_path)
    stored = Posterior.from_pretrained(tmp_path).config.calibration
    assert stored["temperature"] > 1.2
    assert stored["calibrated_nll"] < stored["nll"] - stored["nll_std_error"]
    (rows,) = batches(runs.label_rows(80, seed=5), 80)
    with load(tmp_path) as model, load(tmp_path, calibrated=False) as plain:
        expected = (plain(**rows).logits / stored["temperature"]).log_softmax(-1)
        found = model(**rows)
        torch.testing.assert_close(found.logits, expected)
        assert float(plain(**rows).loss) == pytest.approx(stored["nll"], rel=1e-5)
        assert float(found.loss) < float(plain(**rows).loss)
        torch.testing.assert_close(model.evaluate_batch(dict(rows))[0]["nll"].mean(), found.loss)
        torch.testing.assert_close(found.epistemic / found.total, plain(**rows).epistemic / plain(**rows).total)


def test_a_temperature_belongs_to_all_members(over_confident: Posterior) -> None:
    fitted = fit_calibration(over_confident, ROWS, base_model=tiny_bert())
    with load(fitted, members=2) as model:
        assert model.mixture_temperature == 1
    with load(fitted) as model:
        assert model.mixture_temperature == fitted.config.calibration["temperature"]
        with model.showing(model.theta[:1]):
            assert model.mixture_temperature == 1


def test_a_second_fit_replaces_the_first(over_confident: Posterior) -> None:
    once = fit_calibration(over_confident, ROWS, base_model=tiny_bert())
    twice = fit_calibration(once, ROWS, base_model=tiny_bert(), batch_size=80)
    for name in ("temperature", "nll", "calibrated_nll"):
        assert twice.config.calibration[name] == pytest.approx(once.config.calibration[name], rel=1e-4)


def test_a_linearised_posterior_is_calibrated_as_it_predicts(tmp_path: Path) -> None:
    trainer = runs.trainer(
        tmp_path, LaplaceConfig(prior_std=3.0), model=tiny_bert(), subspace="last_layer", train=runs.label_rows(10),
        max_steps=60, learning_rate=0.3,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
        fitted = fit_calibration(trainer.posterior, ROWS, base_model=tiny_bert())
    assert (fitted.config.calibration["prediction"], fitted.config.calibration["num_members"]) == ("linearised", 0)
    with load(fitted) as model:
        assert model.mixture_temperature == fitted.config.calibration["temperature"]
        assert model.linearise("probit").mixture_temperature == 1  # another prediction


def test_generation_draws_from_the_tempered_mixture(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, EnsembleConfig(num_chains=2, prior_std=1.0), max_steps=40, learning_rate=0.1)
    trainer.train()
    fitted = fit_calibration(trainer.posterior, runs.token_rows(20, seed=9), base_model=tiny_llama())
    t = fitted.config.calibration["temperature"]
    assert t > 1.1
    inputs = {name: value[:1] for name, value in batch().items() if name in ("input_ids", "attention_mask")}
    with BayesianModelForCausalLM.from_pretrained(fitted, base_model=tiny_llama()) as model:
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        scores = model.score(out.sequences, first=inputs["input_ids"].shape[1])
        logits = model(out.sequences).logits[:, -4:-1]
        torch.testing.assert_close(out.logprobs, logits.gather(-1, out.sequences[:, -3:, None])[..., 0])
        torch.testing.assert_close(scores.total, -(logits.exp() * logits).sum(-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.epistemic, out.epistemic, rtol=1e-4, atol=1e-6)
        with model.showing(model.theta):
            plain = model(out.sequences).logits[:, -4:-1]
    torch.testing.assert_close(logits, (plain / t).log_softmax(-1))


def test_bad_batch_sizes_and_few_rows_are_refused(over_confident: Posterior) -> None:
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        fit_calibration(over_confident, ROWS, batch_size=0)
    with pytest.raises(ValueError, match="at least 50 labels, got 20"):
        fit_calibration(over_confident, ROWS[:20], base_model=tiny_bert())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "heldout has 0 rows; fit_calibration needs some"),
        (None, "must have rows that can be counted .* got NoneType"),
        ((row for row in ROWS), "must have rows that can be counted .* got generator"),
        ([{"input_ids": [3, 4]}], "gives no labels"),
    ],
)
def test_rows_that_judge_nothing_are_refused(over_confident: Posterior, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_calibration(over_confident, rows, base_model=tiny_bert())


def test_a_threshold_of_another_temperature_is_left_out(over_confident: Posterior) -> None:
    config = dataclasses.replace(over_confident.config, abstention=RULE.to_dict())
    found = fit_calibration(dataclasses.replace(over_confident, config=config), ROWS, base_model=tiny_bert())
    assert found.config.calibration["temperature"] > 1.2
    assert not found.config.abstention
