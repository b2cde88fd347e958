"""Predictions of loaded posteriors in a single pass: classes, numbers, words, generation and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StaticCache

from hf_bayes import BayesianModelForSequenceClassification, SGHMCConfig
from hf_bayes.core.layout import select
from hf_bayes.distributions.covariance import COVARIANCES, LowRank
from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.models.single_pass.drawn import LEADING, LEADING_OF_WORDS, RANK
from scripts.reproduce.small_models import attached
from tests import tiny_models as models
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import DOUBLE, normal
from tests.models.trained import from_disk
from tests.runs import label_rows, trainer
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, tiny_llama, with_lora

LANGUAGE = {
    "llama": lambda: with_lora(tiny_llama(dtype=DOUBLE, eos_token_id=None)),
    "gpt2": lambda: with_lora(tiny_gpt2(dtype=DOUBLE, eos_token_id=None)),
    "llama values": lambda: with_lora(
        tiny_llama(dtype=DOUBLE, eos_token_id=None), target_modules=["v_proj"], layers_to_transform=[1]
    ),
}


def test_a_head_predicts_as_the_linearised_model() -> None:
    for kind in COVARIANCES:
        model = tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6)
        covariance = random_covariance(kind, select(model, "last_layer"))
        inputs = models.inputs_of(model, padding="right")
        with attached(model, "last_layer", covariance=covariance) as bayesian:
            expected = bayesian.linearise("probit")(**inputs).logits
            for structure in ("backward", "low_rank"):
                found = bayesian.single_pass(structure=structure, link="probit")(**inputs).logits
                assert (found - expected).abs().max() < 1e-10  # a linear model: rounding


def test_names_of_predictions_choose_a_single_pass() -> None:
    model = with_lora(tiny_bert(dtype=DOUBLE))
    with attached(model, "trainable") as bayesian:
        output = bayesian.predict_by("single_pass")(**models.inputs_of(model))
        assert bayesian.is_closed_form
        assert not bayesian.predictor.prediction.startswith("linearised")
        assert output.epistemic is not None
        assert bool((output.epistemic > 0).all())
        bayesian.predict_by("members")
        assert not bayesian.is_closed_form


def test_words_take_the_drift_and_few_leading_columns() -> None:
    dim = select(LANGUAGE["llama"](), "trainable").dim
    swag = LowRank.plus(torch.full((dim,), 1e-2, dtype=DOUBLE), 1e-2 * normal(dim, LEADING))
    for covariance, rank in ((swag, LEADING_OF_WORDS), (None, RANK)):
        with attached(LANGUAGE["llama"](), "trainable", covariance=covariance) as bayesian:
            single = bayesian.single_pass().predictor.single
            assert (single.structure, single.rank, single.second_order) == ("low_rank", rank, True)
            assert not bayesian.single_pass(structure="diagonal").predictor.single.second_order


@pytest.mark.parametrize("structure", ["low_rank", "diagonal"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_cache_gives_the_predictions_of_the_whole_text(name: str, padding: str | None, structure: str) -> None:
    inputs = batch(rows=3, length=6, padding=padding)
    with attached(LANGUAGE[name](), "trainable") as bayesian:
        bayesian.single_pass(structure=structure)
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        output = bayesian.generate(**inputs, **options)
        without = bayesian.generate(**inputs, **options, use_cache=False)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], 1)
        scores = bayesian.score(output.sequences, mask, first=6)
    assert torch.equal(output.sequences, without.sequences)
    for field in ("epistemic", "total", "logprobs"):
        assert (output[field] - without[field]).abs().max() < 1e-5
        assert (output[field] - getattr(scores, field)).abs().max() < 1e-5
    assert bool((output.epistemic > 1e-6).all())


@pytest.mark.parametrize("structure", ["low_rank", "diagonal"])
def test_beams_reorder_variances_in_the_cache(structure: str) -> None:
    with attached(LANGUAGE["llama"](), "trainable") as bayesian:
        bayesian.single_pass(structure=structure)
        options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
        cached = bayesian.generate(**batch(rows=2), **options)
        assert torch.equal(cached, bayesian.generate(**batch(rows=2), **options, use_cache=False))


def test_draws_are_refused_with_what_to_do(tmp_path: Path) -> None:
    base = from_disk(tiny_bert(), tmp_path / "base")
    rows = label_rows(16)
    run = trainer(
        tmp_path / "run", SGHMCConfig(num_chains=2, draws_per_chain=2), model=with_lora(base), train=rows, max_steps=8
    )
    run.train()
    run.save_model()
    with pytest.raises(ValueError, match=r"a Gaussian through the draws.*Gaussian \(such as .*METHODS.*\), distil"):
        BayesianModelForSequenceClassification.from_pretrained(tmp_path / "run", prediction="single_pass")


def test_full_structure_is_refused_for_language_models() -> None:
    with attached(LANGUAGE["llama"](), "trainable") as bayesian:
        with pytest.raises(ValueError, match="'low_rank' or 'diagonal'"):
            bayesian.single_pass(structure="full")
        assert not bayesian.is_closed_form


@pytest.mark.parametrize("build", [LANGUAGE["llama"], lambda: with_lora(tiny_bert(dtype=DOUBLE))])
def test_a_rank_is_refused_where_there_are_no_columns(build: Any) -> None:
    with attached(build(), "trainable") as bayesian:
        for rank in (4, 0, True):
            with pytest.raises(ValueError, match=rf"got rank={rank} with structure='diagonal'.*leave rank out"):
                bayesian.single_pass(structure="diagonal", rank=rank)
        for rank in (0, True, -3, 2.5):
            with pytest.raises(ValueError, match=r"rank must be a whole number of at least 1"):
                bayesian.single_pass(structure="low_rank", rank=rank)
        with pytest.raises(ValueError, match=r"structure must be one of .*'banana'"):
            bayesian.single_pass(structure="banana", rank=4)
        assert not bayesian.is_closed_form


@pytest.mark.parametrize("structure", ["low_rank", "diagonal"])
def test_a_calibration_factor_scales_uncertainty(structure: str) -> None:
    with attached(LANGUAGE["llama values"](), "trainable") as bayesian:
        bayesian.single_pass(structure=structure)
        before = bayesian(**batch(rows=2)).epistemic
        bayesian.predictor.set_factors(dict.fromkeys(bayesian.predictor.paths, 4.0))
        ratio = bayesian(**batch(rows=2)).epistemic / before
    assert (ratio - 4).abs().max() < 0.1  # entropy limits the epistemic uncertainty


def test_epistemic_uncertainty_of_low_rank_is_that_of_members() -> None:
    with attached(LANGUAGE["llama"](), "trainable") as bayesian:
        gaussian = bayesian.posterior.approximation
        draws = gaussian.sample(2000, torch.Generator().manual_seed(0))
        with torch.no_grad(), bayesian.members.bind(draws):
            probs = bayesian.members.logits(batch(rows=1)).softmax(-1)
        entropy = torch.special.entr(torch.stack([probs.mean(0), *probs])).sum(-1)
        expected = entropy[0] - entropy[1:].mean(0)
        found = bayesian.single_pass(rank=512)(**batch(rows=1)).epistemic
        diagonal = bayesian.single_pass(structure="diagonal")(**batch(rows=1)).epistemic
    # 4 sqrt(2 / 512 / 4): the words share few directions; curvature is of order 1e-4
    assert (found / expected - 1).abs().max() < 0.15
    assert (diagonal / expected - 1).abs().max() > 0.15


@pytest.mark.parametrize("prediction", ["members", "linearised", "single_pass"])
def test_words_are_at_the_temperature_of_the_mixture(prediction: str) -> None:
    model = LANGUAGE["llama"]()
    inputs = models.inputs_of(model)
    with attached(model, "trainable") as bayesian, torch.no_grad():
        bayesian.predict_by(prediction)
        plain = bayesian(**inputs).logits
        theta = bayesian.theta.detach()
        with bayesian.showing(theta, temperature=0.5):
            cold = bayesian(**inputs).logits
        assert (cold - (plain / 0.5).log_softmax(-1)).abs().max() < 1e-6  # sums of probabilities are float32
        with bayesian.showing(theta, temperature=2.0):
            assert (bayesian(**inputs).logits - (plain / 2).log_softmax(-1)).abs().max() < 1e-6


def test_static_caches_are_refused_where_keys_are_uncertain() -> None:
    settings = {"max_new_tokens": 2, "return_dict_in_generate": True, "do_sample": False}
    for subspace, refused in (("last_block", True), ("last_layer", False)):
        with attached(tiny_llama(), subspace) as bayesian, torch.no_grad():
            bayesian.single_pass()
            cache = StaticCache(config=bayesian.core.config, max_cache_len=16)
            expected = bayesian.generate(**batch(), **settings)
            for static in ({"cache_implementation": "static"}, {CACHE: cache}):
                if refused:
                    name = next(iter(static))
                    with pytest.raises(ValueError, match=rf"generate\({name}=.*not supported by a single pass"):
                        bayesian.generate(**batch(), **settings, **static)
                else:
                    found = bayesian.generate(**batch(), **settings, **static)
                    torch.testing.assert_close(found["epistemic"], expected["epistemic"])


@pytest.mark.parametrize("structure", ["diagonal", "low_rank"])
@pytest.mark.parametrize("build", [tiny_bert, tiny_llama])
def test_a_widened_model_predicts_as_before(build: Any, structure: str) -> None:
    inputs = batch(rows=2)
    with attached(with_lora(build()), "trainable") as bayesian, torch.no_grad():
        narrow = bayesian.single_pass(structure=structure)(**inputs)
        wide = bayesian.double()(**inputs)
    torch.testing.assert_close(wide.epistemic, narrow.epistemic.to(wide.epistemic), rtol=1e-3, atol=1e-5)
    assert next(bayesian.core.parameters()).dtype == DOUBLE
