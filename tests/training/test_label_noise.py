"""The noise of a regression that a trainer learns from held-out rows."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from transformers import TrainerCallback

from hf_bayes import BayesianModelForSequenceClassification, Posterior
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives.range_test import usual_rate
from hf_bayes.training import active_run, map_comparison
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.adamw_estimate import adamw_estimate
from hf_bayes.training.label_noise import LEAST_PILOT
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.tiny_models import tiny_bert

SPREAD = 2.0
"""The standard deviation of the labels, which tell nothing about the tokens."""


def rows(count: int, *, seed: int = 0, mean: float = 0.0) -> list[dict[str, Any]]:
    labels = mean + SPREAD * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [{**row, "label": float(y)} for row, y in zip(runs.label_rows(count, seed=seed), labels, strict=True)]


def trainer(directory: Path, method: Any = None, heldout: Any = 60, **changes: Any) -> BayesianTrainer:
    settings = {"learning_rate": 0.02, "max_steps": 12, "per_device_train_batch_size": 4, **changes}
    return runs.trainer(
        directory, method or EnsembleConfig(num_chains=3), model=tiny_bert(num_labels=1), subspace="last_layer",
        train=rows(16), eval_dataset=rows(heldout, seed=5) if isinstance(heldout, int) else heldout, **settings,
    )  # fmt: skip


def outputs(run: BayesianTrainer, theta: Tensor, heldout: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the numbers of every member [M, n], by plain passes, and the labels [n]."""
    model = run.bayesian
    found = []
    with torch.no_grad():
        for member in theta:
            with model.showing(member[None]):
                batch = {name: torch.tensor([row[name] for row in heldout]) for name in ("input_ids", "attention_mask")}
                found.append(model(**batch).logits[:, 0])
    return torch.stack(found).double(), torch.tensor([row["label"] for row in heldout], dtype=torch.float64)


def root_mean_square(run: BayesianTrainer, theta: Tensor, heldout: list[dict[str, Any]]) -> float:
    means, labels = outputs(run, theta, heldout)
    return float((labels - means).square().mean().sqrt())


class Noises(TrainerCallback):
    """Keeps the positions of the chains and the noise after each update, by its number."""

    def __init__(self) -> None:
        self.trainer: BayesianTrainer | None = None
        self.seen: dict[int, tuple[Tensor, float | None]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        now = self.trainer.run.theta.detach().clone(), self.trainer.bayesian.likelihood.noise_std
        self.seen[state.global_step] = now


def watched(directory: Path, method: Any, **changes: Any) -> Noises:
    watch = Noises()
    watch.trainer = trainer(directory, method, callbacks=[watch], **changes)
    watch.trainer.train()
    return watch


def test_a_run_begins_with_the_residuals_of_its_model(tmp_path: Path) -> None:
    watch = watched(tmp_path, MAPConfig())
    assert watch.trainer is not None
    start = root_mean_square(watch.trainer, watch.trainer.setup.start[None], rows(60, seed=5))
    assert [noise for _, noise in watch.seen.values()] == [pytest.approx(start, rel=1e-5)] * 12  # float32 residuals
    assert start == pytest.approx(SPREAD, rel=0.3)  # 60 labels


@pytest.mark.parametrize(
    "method", [SGHMCConfig(num_chains=2, burn_in=6), HMCConfig(num_chains=2, burn_in=6), MeanFieldConfig(num_chains=2)]
)
def test_a_short_map_estimate_shows_the_noise(tmp_path: Path, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def kept(*args: Any, **settings: Any) -> Tensor:
        found.append((settings, adamw_estimate(*args, **settings)))
        return found[-1][1]

    monkeypatch.setattr(active_run, "adamw_estimate", kept)
    watch = watched(tmp_path, method, map_updates=0)
    assert watch.trainer is not None
    ((settings, theta),) = found
    assert settings["num_updates"] == LEAST_PILOT
    assert settings["learning_rate"] == usual_rate(LEAST_PILOT)
    expected = root_mean_square(watch.trainer, theta, rows(60, seed=5))
    assert [noise for _, noise in watch.seen.values()] == [pytest.approx(expected, rel=1e-5)] * 12
    assert watch.trainer.posterior.config.diagnostics["noise_std_of_run"] == watch.seen[12][1]


def test_a_short_estimate_has_the_rate_of_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    def kept(*args: Any, **settings: Any) -> Tensor:
        rates.append(settings["learning_rate"])
        return adamw_estimate(*args, **settings)

    monkeypatch.setattr(active_run, "adamw_estimate", kept)
    active = runs.started(trainer(tmp_path, MeanFieldConfig(num_chains=2), learning_rate=None, max_steps=50))
    assert active.settings.found_rate is not None
    # a tenth of 2 gradients for 50 updates of 2 chains
    assert rates == [pytest.approx(active.settings.found_rate * math.sqrt(50 / 20))]


def test_a_warm_start_ends_with_a_measurement(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=2, warm_start_steps=7, burn_in=20)
    watch = watched(tmp_path, method, learning_rate=None, max_steps=40)
    assert watch.trainer is not None
    expected = root_mean_square(watch.trainer, watch.seen[7][0], rows(60, seed=5))
    noises = [noise for _, noise in watch.seen.values()]
    assert len(set(noises[:7])) == 1
    assert noises[6] != noises[7]
    assert noises[7:] == [pytest.approx(expected, rel=1e-5)] * 33


def test_predictions_use_the_noise_that_fits_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(tmp_path)
    with caplog.at_level(logging.INFO, logger="hf_bayes"):
        run.train()
    means, labels = outputs(run, run.posterior.members(), rows(60, seed=5))

    def nll(log_std: float) -> float:
        scores = -0.5 * ((labels - means) / math.exp(log_std)).square() - log_std
        return -float((scores.logsumexp(0)).sum())

    best = math.exp(float(minimize_scalar(nll, bounds=(-3, 3), method="bounded").x))
    found = run.posterior.config.head["noise_std"]
    assert found == pytest.approx(best, rel=1e-3)  # float32, and a spline between 25 values
    assert found == run.bayesian.likelihood.noise_std
    assert f"noise_std {found:.3g}, learnt from 60 held-out rows" in caplog.text
    run.save_model()
    assert run.bayesian.likelihood.noise_std == found  # also after the MAP estimate had its own
    saved = Posterior.from_pretrained(tmp_path)
    with BayesianModelForSequenceClassification.from_pretrained(saved, base_model=tiny_bert(num_labels=1)) as model:
        assert model.likelihood.noise_std == found


def test_an_estimate_to_compare_with_has_a_noise_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, SGHMCConfig(num_chains=2), map_updates=40)
    run.train()
    noise, seen, used = run.active.noise, [], []
    assert noise is not None
    fitted = run.bayesian.likelihood
    with noise.using(2 * noise.of_run):
        assert run.bayesian.likelihood.noise_std == 2 * noise.of_run
    assert run.bayesian.likelihood is fitted
    best_fit, estimate = noise.best_fit, map_comparison.adamw_estimate

    def fit_seen(max_rows: int) -> Any:
        seen.append(best_fit(max_rows))
        return seen[-1]

    def estimate_seen(*args: Any, **settings: Any) -> Tensor:
        used.append(run.bayesian.likelihood.noise_std)
        return estimate(*args, **settings)

    def measure_seen(host: TrainerHost, prefix: str) -> dict[str, float]:
        measured[prefix] = run.bayesian.likelihood.noise_std
        return measure(host, prefix)

    noise.best_fit = fit_seen  # type: ignore[method-assign]
    monkeypatch.setattr(map_comparison, "adamw_estimate", estimate_seen)
    measure, measured = TrainerHost.measure, {}
    monkeypatch.setattr(TrainerHost, "measure", measure_seen)
    run.save_model()
    (found,) = seen
    assert measured == {"eval": run.posterior.config.head["noise_std"], "map": found.noise_std}
    assert measured["eval"] != measured["map"]
    assert run.bayesian.likelihood.noise_std == run.posterior.config.head["noise_std"]
    assert used == [run.posterior.config.diagnostics["noise_std_of_run"]]  # its prior has the weight of the chains'


def test_a_given_noise_stays(tmp_path: Path) -> None:
    run = trainer(tmp_path, noise_std=0.7)
    run.train()
    assert run.posterior.config.head["noise_std"] == 0.7
    assert "noise_std_of_run" not in run.posterior.config.diagnostics


def test_an_evaluation_before_the_run_has_the_spread_of_labels(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    labels = torch.tensor([row["label"] for row in rows(60, seed=5)], dtype=torch.float64)
    assert run.bayesian.likelihood.noise_std == pytest.approx(float(labels.std()), rel=1e-6)
    assert math.isfinite(run.evaluate()["eval_nll"])


def test_a_gaussian_is_fitted_with_the_noise_at_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = trainer(tmp_path, LaplaceConfig(num_chains=2)), []
    finish = ActiveRun.finish

    def watched_finish(active: ActiveRun) -> Any:
        seen.append((active.run.theta.clone(), finish(active), active.setup.model.likelihood.noise_std)[::2])
        return finish(active)

    monkeypatch.setattr(ActiveRun, "finish", watched_finish)
    run.train()
    theta, noise = seen[0]
    assert noise == pytest.approx(root_mean_square(run, theta, rows(60, seed=5)), rel=1e-5)


def test_the_noise_of_the_evidence_stands(tmp_path: Path) -> None:
    method = LaplaceConfig(num_chains=2, structure="full", num_samples=None, fit_noise=True)
    run = trainer(tmp_path, method, max_steps=40)
    run.train()
    assert "noise_std_of_run" not in run.posterior.config.diagnostics
    given = trainer(tmp_path / "given", method, max_steps=40, noise_std=run.active.problem.likelihood.noise_std)
    given.train()
    assert run.posterior.config.head["noise_std"] == pytest.approx(given.posterior.config.head["noise_std"], rel=1e-6)


@pytest.mark.parametrize("step", [6, 7, 8])
def test_a_run_resumes_bitwise_around_the_measurement(tmp_path: Path, step: int) -> None:
    def fresh() -> BayesianTrainer:
        method = SGHMCConfig(num_chains=2, warm_start_steps=7, burn_in=20)
        return trainer(tmp_path, method, learning_rate=None, max_steps=40, save_strategy="steps", save_steps=1)

    whole, resumed = fresh(), fresh()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)
    assert resumed.posterior.config.head == whole.posterior.config.head
    assert resumed.posterior.config.diagnostics == whole.posterior.config.diagnostics


def test_a_run_resumes_with_its_held_out_rows_alone(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path, **saving).train()
    other = trainer(tmp_path, heldout=rows(60, seed=6), **saving)
    with pytest.raises(ValueError, match=r"another run: heldout"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_noise_far_below_the_spread_of_labels_is_found(tmp_path: Path) -> None:
    heldout = [{**row, "label": 5.0 + 0.01 * row["label"]} for row in rows(60, seed=5)]
    run = runs.trainer(
        tmp_path, MAPConfig(prior_std=100.0), model=tiny_bert(num_labels=1), subspace="last_layer",
        train=[{**row, "label": 5.0 + 0.01 * row["label"]} for row in rows(16)], eval_dataset=heldout,
        learning_rate=0.2, max_steps=400, per_device_train_batch_size=8,
    )  # fmt: skip
    run.train()
    found = run.posterior.config.head["noise_std"]
    assert found == pytest.approx(root_mean_square(run, run.posterior.members(), heldout), rel=1e-3)
    assert found < run.posterior.config.diagnostics["noise_std_of_run"] / 7


def test_the_loss_of_prior_density_is_that_of_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, SGHMCConfig(num_chains=2))
    run.train()
    noise = run.posterior.config.diagnostics["noise_std_of_run"]
    given = trainer(tmp_path / "given", SGHMCConfig(num_chains=2), noise_std=noise)
    given.train()
    ratios = [each.posterior.config.diagnostics["prior_loss_ratio"] for each in (run, given)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_a_map_estimate_that_diverges_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def diverges(*args: Any, **settings: Any) -> Tensor:
        raise FloatingPointError("nan")

    monkeypatch.setattr(active_run, "adamw_estimate", diverges)
    run = trainer(tmp_path, MeanFieldConfig(num_chains=2))
    run.train()
    noise = run.posterior.config.diagnostics["noise_std_of_run"]
    assert noise == pytest.approx(root_mean_square(run, runs.origin(run), rows(60, seed=5)), rel=1e-5)
    assert f"noise_std stays at {noise:.3g}, because a short MAP estimate diverged" in caplog.text


def test_labels_far_from_zero_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, heldout=rows(60, seed=5, mean=5.0))
    assert "subtract the mean" not in caplog.text
    trainer(tmp_path, heldout=rows(60, seed=5, mean=20.0))
    assert "the labels have mean 20" in caplog.text
    assert "subtract the mean from the labels, and divide them" in caplog.text


def test_the_number_that_is_farthest_from_zero_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def several(count: int, seed: int) -> list[dict[str, Any]]:
        return [{**row, "label": [row["label"], 7.0, row["label"] - 30.0]} for row in rows(count, seed=seed)]

    run = runs.trainer(
        tmp_path, MAPConfig(), model=tiny_bert(num_labels=3, problem_type="regression"), subspace="last_layer",
        train=several(16, 0), eval_dataset=several(60, 5),
    )  # fmt: skip
    assert "number 2 of the labels has mean -3" in caplog.text
    run.train()
    assert math.isfinite(run.evaluate()["eval_nll"])


@pytest.mark.parametrize(
    ("heldout", "words"),
    [
        (None, "there is no eval_dataset"),
        (49, "eval_dataset has 49 rows. Hold out more"),
        ({"a": rows(60), "b": rows(60)}, "none is named 'heldout'"),
        ([{**row, "label": 1.5} for row in rows(60)], "all labels of eval_dataset are 1.5"),
    ],
)
def test_rows_that_cannot_show_the_noise_are_refused(tmp_path: Path, heldout: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, heldout=heldout)


def test_weighted_numbers_need_their_noise(tmp_path: Path) -> None:
    weighted = [{**row, "weight": 1.0} for row in rows(60)]
    with pytest.raises(ValueError, match=r"noise_std > 0.*Without likelihood=, a trainer learns it"):
        trainer(tmp_path, heldout=weighted, likelihood=Weighted())
