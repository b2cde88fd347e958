"""The prior precision from held-out rows: its gradient, the end of the descent, and protection from overfitting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_bayes import BayesianModelForSequenceClassification, LaplaceConfig, fit_laplace
from hf_bayes.methods.laplace import heldout_prior
from hf_bayes.methods.laplace.curvature import (
    Curvature,
    DiagonalCurvature,
    FullCurvature,
)
from hf_bayes.methods.laplace.heldout_prior import search
from hf_bayes.methods.laplace.kronecker_curvature import KroneckerCurvature, KroneckerFactors
from hf_bayes.methods.laplace.low_rank_curvature import LowRankCurvature
from hf_bayes.methods.laplace.prior_precision import temper_draws
from hf_bayes.methods.laplace.supported import STRUCTURES
from hf_bayes.models.attaching import attach
from tests.fit.fitted import NOISE, STD, regression
from tests.runs import label_rows, trainer

pytestmark = pytest.mark.models


def curvatures() -> list[Curvature]:
    rng = torch.Generator().manual_seed(0)
    columns = torch.randn(6, 3, generator=rng, dtype=torch.float64)
    columns[:, 2] = 0  # B'B has an eigenvalue 0 twice where tau is constant
    columns[:, 1] = 0
    square = torch.randn(3, 3, generator=rng, dtype=torch.float64)
    values, left = torch.linalg.eigh(square @ square.T)
    block = KroneckerFactors(left, None, values[:, None] * torch.tensor([[1.0, 3.0]]))
    full = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    return [
        DiagonalCurvature(columns.square().sum(1)),
        KroneckerCurvature((block,)),
        LowRankCurvature(columns),
        FullCurvature(full @ full.T),
    ]


@pytest.mark.parametrize("curvature", curvatures(), ids=lambda one: one.kind)
def test_draws_follow_the_covariance_and_are_differentiable(curvature: Curvature) -> None:
    rng = torch.Generator().manual_seed(1)
    noise = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    for log_tau in (torch.zeros(6).double(), torch.randn(6, generator=rng, dtype=torch.float64)):
        found = curvature.draws(log_tau.exp(), noise, temperature=0.5)
        expected = curvature.covariance(log_tau.exp(), temperature=0.5).root(noise)
        assert (found - expected).abs().max() < 1e-12  # float64
        assert torch.autograd.gradcheck(
            lambda x: temper_draws(curvature, x.exp(), noise, temperature=0.5, what="likelihood"),
            log_tau.requires_grad_(),
        )


SPREAD = 0.3
"""The prior standard deviation that predicts the held-out rows of ``linear`` best."""


def linear(num_rows: int = 12, num_heldout: int = 40) -> tuple[Any, list[dict], list[dict], Tensor, Tensor, Tensor]:
    """A linear regression, held-out rows with their features and residuals, and the curvature H of the rows.

    Every squared residual is the variance that the prior ``SPREAD`` predicts, so that r^2 / v + log v is least there
    for each row alone.
    """
    model, data, seen, _ = regression(num_rows)
    rows = label_rows(num_heldout, seed=7)
    features: list[Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    with torch.no_grad():
        outputs = torch.cat([model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows])
    handle.remove()
    phi = torch.cat([torch.cat(features), torch.ones(num_heldout, 1, dtype=torch.float64)], 1)
    curvature = seen.T @ seen / NOISE**2
    signs = torch.tensor([1.0, -1.0]).double().repeat(num_heldout)[:num_heldout]
    labels = (outputs + signs * variances(phi, curvature, math.log(SPREAD)).sqrt()).float().double()  # as they arrive
    for row, label in zip(rows, labels.tolist(), strict=True):
        row["label"] = label
    return model, data, rows, phi, labels - outputs, curvature


def variances(phi: Tensor, curvature: Tensor, log_std: float) -> Tensor:
    """Return the variances [n] of the predictive distribution, in closed form."""
    covariance = torch.linalg.inv(curvature + math.exp(-2 * log_std) * torch.eye(5))
    return NOISE**2 + (phi @ covariance * phi).sum(1)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_the_search_finds_the_best_std_of_linear_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, rows, phi, residuals, curvature = linear()
    monkeypatch.setattr("hf_bayes.methods.laplace.heldout_prior.NUM_MEMBERS", 300)
    posterior = fit_laplace(
        model, data, LaplaceConfig(structure="full", num_samples=None, fit_prior="heldout", prior_std=2.0),
        heldout=rows, subspace="last_layer", noise_std=NOISE, batch_size=40,
    )  # fmt: skip
    (note,) = posterior.config.diagnostics["laplace"]

    def nats(log_std: float) -> float:
        spread = variances(phi, curvature, log_std)
        return float(0.5 * (residuals.square() / spread + (2 * math.pi * spread).log()).mean())

    best, found = math.log(SPREAD), -0.5 * math.log(note["prior_precision"])
    assert nats(best) < min(nats(best - 0.01), nats(best + 0.01))  # inside, by construction
    assert note["heldout_nll"]["rows"] == "all"
    # of 300 draws: four seeds ended 3e-5 to 1.4e-4 nats above the best
    tolerance = 5e-4
    assert nats(found) - nats(best) < tolerance
    # the twins: what was given, and no spread, where the mean of members' nats would go in place of the mixture's
    assert nats(math.log(2.0)) - nats(best) > 2 * tolerance
    assert nats(-20.0) - nats(best) > 2 * tolerance
    assert note["heldout_nll"]["found"] < min(note["heldout_nll"][name] for name in ("map", "given", "common"))


class Bowl:
    """A quadratic loss with a known minimum."""

    def __init__(self, place: list[float], scales: list[float]) -> None:
        self.place, self.scales = torch.tensor(place).double(), torch.tensor(scales).double()
        self.asked = 0

    def __call__(self, where: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
        self.asked += 1
        away = where.detach() - self.place
        nats = float(0.5 * (self.scales * away.square()).sum())
        return nats, self.scales * away if gradient else None


def test_a_descent_on_all_rows_ends_in_the_minimum() -> None:
    bowl = Bowl([0.7, -2.0], [1e-3, 0.1])
    found = search(2, bowl, None, at_map=lambda: 9.0)
    assert (found.log_factors - bowl.place).abs().max() < 1e-2  # slopes end at 1e-5 of the first
    assert found.report["rows"] == "all"
    assert bowl.asked < 60


def test_a_descent_ends_at_its_smallest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat(Bowl):
        """A quartic: the steps of a descent become smaller by a constant factor."""

        def __call__(self, where: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
            self.asked += 1
            away = where.detach() - self.place
            return float((self.scales * away**4).sum()), 4 * self.scales * away**3 if gradient else None

    asked = []
    for smallest in (10.0, heldout_prior.SMALLEST_STEP):
        monkeypatch.setattr(heldout_prior, "SMALLEST_STEP", smallest)
        flat = Flat([0.7, -1.3], [1.0, 0.3])
        found = search(2, flat, None, at_map=lambda: 9.0)
        asked.append(flat.asked)
    assert asked[0] < asked[1]  # 10 ends it at the first step
    assert (found.log_factors - flat.place).abs().max() < 0.05


def test_the_other_half_of_the_rows_says_where_to_stop() -> None:
    one, other = Bowl([1.0, 3.0], [1.0, 0.02]), Bowl([1.0, 0.0], [1.0, 0.02])
    found = search(2, one, other, at_map=lambda: 9.0)
    assert found.report["rows"] == "odd"
    # the first half would go to 3, which the second has nothing from
    assert abs(float(found.log_factors[1])) < 1.5
    assert found.report["found"] == min(v for v in found.report.values() if not isinstance(v, str))
    twin = search(2, one, None, at_map=lambda: 9.0)
    assert abs(float(twin.log_factors[1]) - 3) < 0.1


def test_rows_that_want_no_spread_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"predicted best by the weights alone: -1 nats, with the best spread"):
        search(1, Bowl([0.0], [1.0]), None, at_map=lambda: -1.0)


def test_nats_that_are_not_finite_do_not_end_the_search() -> None:
    bowl = Bowl([1.0], [1.0])

    def cliff(where: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
        if float(where) > 1.05:
            return math.inf, torch.full((1,), math.nan).double() if gradient else None
        return bowl(where, gradient=gradient)

    assert float(search(1, cliff, None, at_map=lambda: 9.0).log_factors) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:held-out rows", "ignore:structure=")
@pytest.mark.parametrize("scope", ["model", "tensor", "element"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_and_scope_is_fitted_by_held_out_rows(structure: str, scope: str) -> None:
    model, data, rows, *_ = linear(num_heldout=8)
    config = LaplaceConfig(structure=structure, fit_prior="heldout", prior_scope=scope, prior_std=1.0, rank=3)
    posterior = fit_laplace(model, data, config, heldout=rows, subspace="last_layer", noise_std=NOISE)
    (note,) = posterior.config.diagnostics["laplace"]
    report = note["heldout_nll"]
    assert report["rows"] == ("all" if scope == "model" else "odd")
    assert report["found"] <= min(report["given"], report["common"])
    sizes = {"model": None, "tensor": 2, "element": 3}
    found = note["prior_precision"]
    assert (None if isinstance(found, float) else len(found)) == sizes[scope]
    plain = fit_laplace(model, data, LaplaceConfig(structure=structure, prior_std=1.0, rank=3), **{
        "subspace": "last_layer", "noise_std": NOISE,
    })  # fmt: skip
    assert not torch.allclose(posterior.approximation.stds, plain.approximation.stds, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:held-out rows")
def test_a_mapping_has_one_factor_for_each_expression() -> None:
    model, data, rows, *_ = linear(num_heldout=8)
    config = LaplaceConfig(fit_prior="heldout", prior_std={"weight": 0.5, "bias": 2.0})
    posterior = fit_laplace(model, data, config, heldout=rows, subspace="last_layer", noise_std=NOISE)
    (note,) = posterior.config.diagnostics["laplace"]
    weight, bias = note["prior_precision"]
    assert abs(math.log(weight / bias) - math.log(16)) > 1e-3  # a factor for both would keep the ratio


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"fit_prior": "evidence"},
            {"heldout": label_rows(2)},
            "heldout= fits a temperature of the mixture, and the labels are numbers",
        ),
        ({"fit_prior": "heldout"}, {}, "fits by the rows of heldout=, got None"),
        ({"fit_prior": "heldout"}, {"heldout": label_rows(1)}, "at least 2 rows, got 1"),
    ],
)
def test_unused_and_missing_held_out_rows_are_refused(changes: dict, options: dict, message: str) -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match=message):
        fit_laplace(model, data, LaplaceConfig(**changes), subspace="last_layer", noise_std=NOISE, **options)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("prediction", ["linearised", "linearised_probit", "single_pass"])
def test_held_out_rows_refuse_a_model_that_mixes_no_networks(tmp_path: Path, prediction: str) -> None:
    model, data, *_ = regression()
    fit_laplace(model, data, subspace="last_layer", noise_std=NOISE).save_pretrained(tmp_path)
    config = LaplaceConfig(fit_prior="heldout")
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=model)
    message = rf"got a model whose prediction is '{prediction}': call linearise\(None\) first"
    with loaded.predict_by(prediction) as bayesian, pytest.raises(ValueError, match=message):
        fit_laplace(bayesian, data, config, heldout=data)


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:.*worse than a MAP")
def test_the_trainer_learns_regression_noise_like_fit_laplace(tmp_path: Path) -> None:
    model, data, *_ = regression()
    config = LaplaceConfig(structure="full", num_samples=None, fit_noise=True, prior_std=STD, num_chains=2)
    options = {"subspace": "last_layer", "max_steps": 30, "noise_std": 2.0}
    run = trainer(tmp_path, config, model=model, train=data, eval_dataset=data[:4], **options)
    run.train()
    found = run.posterior.config.head["noise_std"]
    assert run.evaluate()["eval_predictive_std"] >= found  # in what predicts, too
    assert abs(math.log(found / 2.0)) > 0.1
    means = run.posterior.approximation.means
    begun: list[float] = []

    class Watched(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append(run.bayesian.likelihood.noise_std)

    run.add_callback(Watched())
    run.train()
    assert set(begun) == {2.0}  # again the given noise, and not the learnt one
    run.bayesian.detach()
    with attach(model, means, subspace="last_layer", noise_std=2.0) as bayesian:
        again = fit_laplace(bayesian, data, config)
    assert again.config.head["noise_std"] == pytest.approx(found, rel=1e-6)  # float64, other batches


def test_the_trainer_refuses_to_learn_the_noise_of_a_classifier(tmp_path: Path) -> None:
    run = trainer(tmp_path, LaplaceConfig(fit_noise=True))
    with pytest.raises(ValueError, match="fit_noise=True is for regressions: this likelihood has no noise_std"):
        run.train()
    assert run.state.global_step == 0
