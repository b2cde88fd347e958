"""A user's likelihood in fits to finished models: Laplace, training-free posteriors and curvature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hf_bayes import (
    LaplaceConfig,
    Posterior,
    attach,
    curvature_of_model,
    fit_calibration,
    fit_laplace,
    fit_layer_factors,
    fit_training_free,
    fit_variance_factor,
)
from hf_bayes.decide.abstention import fit_abstention
from hf_bayes.distributions.covariance import dense
from hf_bayes.members.stacked import refuse_attached
from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.fit.fitted import NOISE, STD, regression
from tests.tiny_models import tiny_bert, with_lora
from tests.training.test_custom_likelihoods import Mean, lstm, rows

DIAGONAL = LaplaceConfig(structure="diagonal", prior_std=1.0)
EMPIRICAL = LaplaceConfig(structure="diagonal", estimator="ef_sequence", prior_std=1.0)


@dataclass(frozen=True)
class KnownNoise(CustomLikelihood):
    """Normal noise of a known standard deviation."""

    name: ClassVar[str] = "known_noise"
    std: float = NOISE

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        residual = (labels - outputs[..., 0]) / self.std
        return -0.5 * residual.square() - math.log(self.std * math.sqrt(2 * math.pi))

    def predict(self, outputs: Tensor) -> Moments:
        return Moments(outputs, torch.full_like(outputs, self.std**2))

    def fisher(self, outputs: Tensor) -> Tensor:
        return torch.ones_like(outputs)[..., None] / self.std**2


def stds(posterior: Posterior) -> Tensor:
    found: Tensor = posterior.approximation.stds  # type: ignore[union-attr]
    return found


def test_normal_noise_of_a_user_is_the_exact_regression() -> None:
    model, data, phi, _ = regression()
    method = LaplaceConfig(structure="full", num_samples=None, prior_std=STD)
    found = {
        std: dense(
            fit_laplace(model, data, method, subspace="last_layer", likelihood=KnownNoise(std))
            .approximation.covariances[0], phi,
        )
        for std in (NOISE, 2 * NOISE)
    }  # fmt: skip
    expected = torch.linalg.inv(phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2)
    assert (found[NOISE] - expected).abs().max() < 1e-9 * expected.abs().max()  # float64 throughout
    assert (found[2 * NOISE] - expected).abs().max() > 0.1 * expected.abs().max()  # the twin: another noise


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "kind"),
    [(Poisson(), 1, "counts"), (Heteroscedastic(), 2, "numbers"), (Ordinal(num_classes=4), 3, "classes")],
)
def test_a_plain_model_is_fitted_as_an_attached_one(
    tmp_path: Path, likelihood: CustomLikelihood, num_outputs: int, kind: str
) -> None:
    data = rows(kind=kind)
    plain = fit_laplace(lstm(num_outputs), data, DIAGONAL, likelihood=likelihood)
    with attach(lstm(num_outputs), likelihood=likelihood) as bayesian:
        assert runs.equal(plain.approximation, fit_laplace(bayesian, data, DIAGONAL).approximation)
        assert runs.equal(
            plain.approximation, fit_laplace(bayesian, data, DIAGONAL, likelihood=likelihood).approximation
        )
    assert plain.config.head["likelihood"] == likelihood.to_dict()
    plain.save_pretrained(tmp_path)
    assert Posterior.from_pretrained(tmp_path).config.head["likelihood"] == likelihood.to_dict()


def test_rows_of_weight_zero_are_left_out() -> None:
    data = rows(weight=[1.0, 0.0] * 12)
    weighted = fit_laplace(lstm(2), data, EMPIRICAL, likelihood=Weighted(Heteroscedastic()))
    plain = data.remove_columns("weight")
    half = fit_laplace(lstm(2), plain.select(range(0, 24, 2)), EMPIRICAL, likelihood=Heteroscedastic())
    torch.testing.assert_close(stds(weighted), stds(half))
    everything = fit_laplace(lstm(2), plain, EMPIRICAL, likelihood=Heteroscedastic())
    assert (stds(weighted) / stds(everything) - 1).abs().max() > 0.1  # the twin: weights that are not read


def test_fits_to_predictions_count_each_weighted_row_once() -> None:
    rows = [{**row, "weight": 1.0 + index % 3} for index, row in enumerate(runs.label_rows(60, seed=5))]
    method = LaplaceConfig(structure="diagonal", estimator="ef_sequence", prior_std=0.3, check_gradient=False)
    posterior = fit_laplace(tiny_bert(), rows, method, subspace="last_layer", likelihood=Weighted())
    ones = [{**row, "weight": 1.0} for row in rows]
    easy = {"error_rate": 0.95, "failure_rate": 0.2}
    for fit, options in (
        (fit_calibration, {}), (fit_abstention, easy), (fit_variance_factor, {}), (fit_layer_factors, {"members": 4}),
    ):  # fmt: skip
        found, other = (fit(posterior, given, base_model=tiny_bert(), **options).config for given in (rows, ones))
        assert found == other
        assert found != posterior.config
    with pytest.raises(ValueError, match="reads one number for each row from the column 'weight'"):
        fit_calibration(posterior, runs.label_rows(60, seed=5), base_model=tiny_bert())


def test_curvature_reads_the_likelihood() -> None:
    data = rows(kind="counts")
    found = curvature_of_model(lstm(1), data, num_samples=None, likelihood=Poisson()).matrix()
    with attach(lstm(1), likelihood=Poisson()) as bayesian:
        torch.testing.assert_close(found, curvature_of_model(bayesian, data, num_samples=None).matrix())


def test_an_adapter_of_ordered_classes_needs_no_training() -> None:
    model = with_lora(tiny_bert(num_labels=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    found = fit_training_free(model, runs.label_rows(40), likelihood=Ordinal(num_classes=3))
    assert found.config.head["likelihood"] == Ordinal(num_classes=3).to_dict()


def test_a_posterior_brings_its_likelihood(tmp_path: Path) -> None:
    model, data, _, _ = regression()
    model = model.float()
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")
    method = LaplaceConfig(structure="diagonal", num_samples=None, prior_std=STD)
    fit_laplace(model, data, method, subspace="last_layer", likelihood=KnownNoise()).save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match="'known_noise' is not registered"):
        fit_laplace(tmp_path / "one", data, method)
    again = fit_laplace(tmp_path / "one", data, method, likelihood=KnownNoise())
    assert again.config.head["likelihood"] == KnownNoise().to_dict()
    with pytest.raises(ValueError, match="the members were trained with the first"):
        fit_laplace(tmp_path / "one", data, method, likelihood=KnownNoise(std=2 * NOISE))


@pytest.mark.parametrize(
    ("likelihood", "options", "words"),
    [
        (Mean(), {}, "do not add up to the N of the data"),
        (Weighted(KnownNoise()), {"method": EMPIRICAL}, "reads one number for each row from the column 'weight'"),
        (Weighted(KnownNoise()), {}, "needs the likelihood's draw, which it does not define"),
        (KnownNoise(), {"noise_std": 1.0}, r"noise_std=1\.0 is the standard deviation"),
        (Heteroscedastic(), {}, "needs 2 outputs, and the head has 1"),
        ("normal", {}, "likelihood must be a CustomLikelihood"),
    ],
)
def test_a_likelihood_that_does_not_fit_is_refused(likelihood: Any, options: dict[str, Any], words: str) -> None:
    model = lstm(1)
    with pytest.raises(ValueError, match=words):
        fit_laplace(model, rows(), **({"method": EMPIRICAL if words.startswith("do") else DIAGONAL} | options),
                    likelihood=likelihood)  # fmt: skip
    refuse_attached(model)  # it was given back


@pytest.mark.parametrize("likelihood", [None, Weighted()])
def test_weighted_numbers_fit_no_temperature_either(likelihood: Weighted | None) -> None:
    model, data, *_ = regression(60)
    data = [{**row, "weight": 1.0} for row in data]
    with pytest.raises(ValueError, match="a temperature of the mixture, and the labels are numbers: leave heldout out"):
        fit_laplace(model, data, EMPIRICAL, heldout=data, subspace="last_layer", noise_std=NOISE, likelihood=likelihood)


def test_another_likelihood_than_the_models_is_refused() -> None:
    with (
        attach(lstm(1), likelihood=Poisson()) as bayesian,
        pytest.raises(ValueError, match="is given with a BayesianModel, which has one of its own"),
    ):
        fit_laplace(bayesian, rows(kind="counts"), DIAGONAL, likelihood=KnownNoise())
