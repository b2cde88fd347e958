"""The linearised variance in few directions of the outputs, by backward passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_bayes import attach
from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, Diagonal
from hf_bayes.models.linearised.outputs import gaussian_outputs
from hf_bayes.models.single_pass.backward import BackwardPredictor, leading_directions
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.weighted import Weighted
from scripts.reproduce.small_models import attached
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import DOUBLE, normal
from tests.tiny_models import inputs_of, tiny_bert, tiny_vit, with_lora


@pytest.mark.parametrize("kind", COVARIANCES)
def test_all_directions_are_the_linearised_model(kind: str) -> None:
    model = with_lora(tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6))
    covariance = random_covariance(kind, select(model))
    inputs = inputs_of(model, padding="right")
    with attached(model, "trainable", covariance=covariance) as bayesian:
        expected = gaussian_outputs(bayesian, bayesian.posterior.approximation, inputs)
        found = BackwardPredictor(bayesian, rank=3).outputs(bayesian, inputs)
        fewer = BackwardPredictor(bayesian, rank=2).outputs(bayesian, inputs)
    assert (found.covariance - expected.covariance).abs().max() < 1e-12 * expected.covariance.abs().max()
    u = leading_directions(expected.mean[0], 2)
    inner = u.mT @ expected.covariance[0] @ u
    rest = torch.eye(3, dtype=DOUBLE) - u @ u.mT  # the logits that all classes share: without effect
    mean = inner.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    error = fewer.covariance[0] - u @ inner @ u.mT - mean * rest
    assert error.abs().max() < 1e-9 * expected.covariance.abs().max()
    probs = expected.mean[0].softmax(-1)
    fisher = torch.diag_embed(probs) - probs[..., None] * probs[..., None, :]
    whole, part = ((fisher * c[0]).sum((-2, -1)) for c in (expected.covariance, fewer.covariance))
    assert (part / whole - 1).abs().max() < 1e-9


def test_the_mean_is_the_models_own_logits_bit_for_bit() -> None:
    for model in (with_lora(tiny_bert()), with_lora(tiny_vit())):
        inputs = inputs_of(model, rows=4)  # not as many rows as positions or channels, so read in one piece
        with torch.no_grad():
            expected = model(**inputs).logits
        with attached(model, "trainable", 1e-20) as bayesian:
            found = BackwardPredictor(bayesian).outputs(bayesian, inputs)
        assert torch.equal(found.mean[0], expected)
        assert found.covariance.abs().max() < 1e-15  # of variances 1e-20 of a thousand weights


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(Heteroscedastic(), 2), (Ordinal(num_classes=4), 3), (Weighted(of=Ordinal(num_classes=4)), 3), (Weighted(), 3)],
)
def test_a_users_likelihood_is_predicted_as_linearised(likelihood: LikelihoodConfig, outputs: int) -> None:
    model = with_lora(tiny_bert(dtype=DOUBLE, hidden_size=4, intermediate_size=6, num_labels=outputs))
    inputs, layout = inputs_of(model), select(model)
    gaussian = Gaussian(initial(model, layout)[None], (random_covariance("diagonal", layout),))
    with attach(model, likelihood=likelihood) as bayesian:
        config = SimpleNamespace(calibration={}, layer_factors={})
        bayesian.posterior = SimpleNamespace(approximation=gaussian, config=config)
        found = bayesian.single_pass(rank=outputs)(**inputs)
        expected = bayesian.linearise("bridge")(**inputs)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)


def test_directions_of_many_classes_are_of_the_probable_ones() -> None:
    logits = 3 * normal(5, 40)
    probs = logits.softmax(-1)
    fisher = torch.diag_embed(probs) - probs[..., None] * probs[..., None, :]
    found = leading_directions(logits, 2)
    best = torch.linalg.eigvalsh(fisher)[..., -2:].sum(-1)
    assert (found.mT @ found - torch.eye(2, dtype=DOUBLE)).abs().max() < 1e-12
    assert ((fisher @ found * found).sum((-2, -1)) / best - 1).abs().max() < 0.01  # 16 classes have most of the mass


def test_calibration_factors_scale_the_variance_of_their_layer() -> None:
    model = with_lora(tiny_bert(dtype=DOUBLE))
    inputs = inputs_of(model)
    with attached(model, "trainable") as bayesian:
        predictor = BackwardPredictor(bayesian)
        before = predictor.outputs(bayesian, inputs).covariance
        predictor.set_factors(dict.fromkeys(predictor.paths, 4.0))
        assert torch.allclose(predictor.outputs(bayesian, inputs).covariance, 4 * before)
        predictor.set_factors({path: 1e-12 for path in predictor.paths[1:]})
        alone = predictor.outputs(bayesian, inputs).covariance
        assert (
            0 < float(alone.detach().diagonal(dim1=-2, dim2=-1).sum() / before.diagonal(dim1=-2, dim2=-1).sum()) < 0.9
        )
        assert set(predictor.paths) == set(bayesian.single_pass(structure="low_rank").predictor.paths)
        with pytest.raises(ValueError, match="'elsewhere'"):
            predictor.set_factors({"elsewhere": 2.0})


def test_settings_that_it_lacks_are_refused() -> None:
    with attached(with_lora(tiny_bert()), "trainable") as bayesian:
        with pytest.raises(ValueError, match="deterministic_scores: choose 'low_rank'"):
            bayesian.single_pass(deterministic_scores=True)
        with pytest.raises(ValueError, match="rank must be a whole number of at least 1, got 0"):
            bayesian.single_pass(rank=0)


def test_variances_that_are_not_finite_are_refused() -> None:
    with attached(with_lora(tiny_bert()), "trainable", 1e38) as bayesian:
        bayesian.single_pass()
        with pytest.raises(ValueError, match="not finite in a single pass"):
            bayesian(**inputs_of(bayesian.model))


def test_a_variance_that_is_not_finite_names_its_layer() -> None:
    model = tiny_bert()
    layout = select(model, r"layer\.\d\.output\.dense")
    std = torch.full((layout.dim,), 1e-3)
    parts = {name: part * (1e21 if "layer.1" in name else 1) for name, part in layout.unflatten(std).items()}
    wide = Diagonal(layout.flatten(parts) * 10)  # variances 1e38, finite in float32
    with (
        attached(model, r"layer\.\d\.output\.dense", covariance=wide) as bayesian,
        pytest.raises(ValueError, match=r"layer\.1\.output\.dense.*not finite in a single pass"),
    ):
        BackwardPredictor(bayesian).outputs(bayesian, inputs_of(model))
