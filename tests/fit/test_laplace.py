"""Tests of ``fit_laplace``: a finished model or a trainer becomes a posterior that saves, loads and predicts."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, EnsembleConfig, LaplaceConfig, fit_calibration, fit_laplace
from hf_bayes.distributions.covariance import dense
from hf_bayes.fit import finished_models as module
from hf_bayes.methods.laplace.supported import STRUCTURES
from hf_bayes.models.attaching import attach
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.tasks import TASKS
from tests import tiny_models as models
from tests.faults import posteriors
from tests.faults.edits import edit_json, sign
from tests.fit.fitted import LAST, NOISE, STD, fit, regression
from tests.members.subject_models import bert_tagger
from tests.runs import label_rows, padding_collator, token_rows, trainer
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora


@pytest.mark.parametrize("num_samples", [None, 1])  # a draw for one number costs what the exact matrix does
def test_full_laplace_is_exact_bayesian_linear_regression(num_samples: int | None) -> None:
    model, data, phi, y = regression()
    posterior = fit(model, data, structure="full", num_samples=num_samples, **LAST)
    precision = phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2
    found = dense(posterior.approximation.covariances[0], phi)
    expected = torch.linalg.inv(precision)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-9  # float64 throughout
    assert torch.equal(posterior.approximation.means[0, :4], model.classifier.weight[0])
    (note,) = posterior.config.diagnostics["laplace"]
    assert note["displacement"] < 1e-5
    marginal = NOISE**2 * torch.eye(len(y)) + STD**2 * phi @ phi.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(y)).double(), marginal).log_prob(y)
    assert note["log_evidence"] == pytest.approx(float(evidence), abs=1e-9)


def test_the_regression_check_catches_wrong_n_and_wrong_prior() -> None:
    model, data, phi, _ = regression()
    expected = torch.linalg.inv(phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2)
    for change in ({"num_data": 24.0}, {"prior_std": STD / 12**0.5}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = fit(model, data, structure="full", num_samples=None, **{**LAST, **change})
        found = dense(posterior.approximation.covariances[0], phi)
        assert (found - expected).abs().max() / expected.abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_finished_adapter_becomes_a_usable_posterior(structure: str, tmp_path: Path) -> None:
    model = with_lora(tiny_llama())
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [
        (parameter.requires_grad, module.training) for module in model.modules() for parameter in module.parameters()
    ]
    posterior = fit(model, token_rows(6), structure=structure, prior_std=0.1, rank=5)
    after = [
        (parameter.requires_grad, module.training) for module in model.modules() for parameter in module.parameters()
    ]
    assert after == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    posterior.save_pretrained(tmp_path)
    assert posteriors.equal(Posterior.from_pretrained(tmp_path), posterior)
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama(), members=4)
    output = loaded(**models.batch())
    assert output.epistemic.min() > 0
    members = posterior.sample(4, torch.Generator().manual_seed(0))
    assert torch.allclose(loaded.theta, members, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_around_the_draws_of_a_posterior_it_is_a_mixture(tmp_path: Path) -> None:
    first, second = (with_lora(tiny_llama(), seed) for seed in (0, 1))
    singles = [fit(model, token_rows(6), prior_std=0.1) for model in (first, second)]
    theta = torch.stack([single.approximation.means[0] for single in singles])
    with attach(with_lora(tiny_llama()), theta) as model:
        mixture = fit(model, token_rows(6), prior_std=0.1).approximation
    assert len(mixture.means) == 2
    for index, single in enumerate(singles):
        assert torch.allclose(mixture.stds[index], single.approximation.stds[0], rtol=1e-5)
    assert not torch.allclose(mixture.stds[0], mixture.stds[1], rtol=1e-2)
    spread = mixture.sample(400, torch.Generator().manual_seed(0))
    assert torch.allclose(spread[::2].mean(0), theta[0], atol=0.05)


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:.*1 member", "ignore:.*did not converge")
def test_a_saved_ensemble_becomes_a_mixture_around_its_draws(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = type(tiny_llama()).from_pretrained(tmp_path / "base")
    run = trainer(tmp_path / "out", EnsembleConfig(num_chains=2, prior_std=0.3), model=with_lora(base), max_steps=4)
    run.train()
    run.save_model()
    mixture = fit(tmp_path / "out", token_rows(), prior_std=0.3, structure="low_rank", rank=3)
    assert torch.equal(mixture.approximation.means, run.posterior.approximation.theta)
    assert mixture.config.subspace == run.posterior.config.subspace
    assert mixture.config.base_model == run.posterior.config.base_model


def text_rows(labels: list[int] | None) -> list[dict[str, Any]]:
    """Return rows of three tokens, with a label for each token, or label 1 for the row."""
    return [{"input_ids": [3, 4 + row, 5], "labels": labels or 1} for row in range(3)]


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("build", "rows"), [
    (lambda: tiny_bert(num_labels=3), text_rows(None)),
    (lambda: bert_tagger(torch.float32), text_rows([0, -100, 2])),
    (tiny_vit, [{"pixel_values": image, "labels": 1} for image in models.images()["pixel_values"]]),
    (tiny_llama, token_rows(3)),
], ids=["classifier", "tagger", "images", "language model"])  # fmt: skip
def test_a_posterior_directory_can_be_fitted_again_for_any_task(build: Any, rows: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "base")
    model = type(build()).from_pretrained(tmp_path / "base")
    first = fit(model, rows, subspace="last_layer", prior_std=0.1)
    first.save_pretrained(tmp_path / "first")
    again = fit(tmp_path / "first", rows, prior_std=0.1, seed=1)
    assert again.config.task == first.config.task
    assert again.config.subspace == "last_layer"
    assert again.approximation.means.shape[1:] == first.approximation.means.shape[1:]


def test_every_stored_task_loads_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert set(module.MODELS) == set(TASKS)
    posteriors.gaussian().save_pretrained(tmp_path)
    edit_json(tmp_path / CONFIG, lambda values: values.update(task="translation"))
    sign(tmp_path)
    with pytest.raises(ValueError, match=r'task must be one of causal_lm, .*, got "translation"'):
        fit(tmp_path, token_rows(3))


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_sequence_unit_divides_the_curvature_by_the_mean_length() -> None:
    rows = token_rows([8, 4, 6])  # 7 + 3 + 5 terms
    stds = {
        unit: fit(
            with_lora(tiny_llama()),
            rows,
            prior_std=1.0,
            data_unit=unit,
            collate=padding_collator(),
            structure="diagonal",
        ).approximation.stds[0]
        for unit in ("token", "sequence")
    }
    h = {unit: std.double() ** -2 - 1 for unit, std in stds.items()}
    informed = h["token"] > 1
    assert torch.allclose(h["token"][informed] / h["sequence"][informed], torch.tensor(5.0).double(), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("options", [
    {"estimator": "ggn"}, {"estimator": "hessian"}, {"structure": "kronecker_corrected"},
    {"structure": "kronecker_corrected", "sharing": "reduce", "prior_std": 10.0},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_neither_the_side_of_padding_nor_batches_matter(build: Any, options: dict[str, Any]) -> None:
    rows = token_rows([8, 3, 6, 2, 5])
    found = {}
    for side, size in itertools.product(("right", "left"), (1, 5)):
        model = with_lora(build(dtype=torch.float64), target_modules=["q_proj"] if build is tiny_llama else ["c_attn"],
                          layers_to_transform=[1], r=1)  # fmt: skip
        posterior = fit(model, rows, collate=padding_collator(side), batch_size=size,
                        **{"prior_std": 0.1} | options)  # fmt: skip
        (note,) = posterior.config.diagnostics["laplace"]
        covariance = posterior.approximation.covariances[0]
        sums = (float(value.sum()) for value in (covariance.precision_diagonal, covariance.variance))
        found[side, size] = posterior.config.num_data, note["log_lik"], note["log_evidence"], *sums
    assert found["right", 1][0] == 19.0  # each row but its first token
    for values in found.values():
        # Llama computes norms in float32
        assert values == pytest.approx(found["right", 1], rel=1e-5)


# -- through the trainer --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_trainer_ends_in_the_fit_around_its_map(structure: str, tmp_path: Path) -> None:
    config = LaplaceConfig(structure=structure, prior_std=0.3, num_chains=2, init_jitter=0.1, estimator="ef_sequence")
    run = trainer(tmp_path / "out", config, max_steps=8, eval_dataset=token_rows(4, seed=3))
    run.train()
    run.save_model()
    found = run.posterior.approximation
    theta = run.run.state.theta
    assert torch.equal(found.means, theta)
    notes = run.posterior.config.diagnostics["laplace"]
    assert len(notes) == 2
    assert all(note["gradient_norm"] > 0 for note in notes)
    assert run.bayesian.num_members == 10  # evaluation and generation see draws of the Gaussians
    run.bayesian.show(theta)
    again = fit_laplace(run.bayesian, token_rows(), config)
    assert torch.allclose(found.stds, again.approximation.stds, rtol=1e-5)
    loaded = Posterior.from_pretrained(tmp_path / "out")
    assert posteriors.equal(loaded, run.posterior)
    assert loaded.config.approximation == ("gaussian" if structure == "diagonal" else "gaussian_kronecker")


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_accumulation_in_the_trainer_changes_nothing(tmp_path: Path) -> None:
    found = []
    for size, steps in ((4, 1), (2, 2), (1, 4)):
        run = trainer(tmp_path / str(size), LaplaceConfig(prior_std=0.3, structure="kronecker"), max_steps=3,
                      per_device_train_batch_size=size, gradient_accumulation_steps=steps,
                      model=with_lora(tiny_gpt2(dtype=torch.float64)))  # fmt: skip
        run.train()
        found.append(run.posterior.approximation)
    for one in found[1:]:
        # float64 sums in another order, through three updates
        assert torch.allclose(one.means, found[0].means, rtol=1e-9, atol=1e-12)
        assert torch.allclose(one.stds, found[0].stds, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_warm_start_hands_the_pass_on(tmp_path: Path) -> None:
    config = LaplaceConfig(prior_std=0.3, warm_start_steps=2)
    run = trainer(tmp_path / "out", config, max_steps=6)
    run.train()
    assert run.posterior.approximation.kind == "gaussian_kronecker"


def test_inference_mode_around_a_fit_changes_nothing() -> None:
    model, data, *_ = regression()
    expected = fit(model, data, structure="diagonal", **LAST)
    with torch.inference_mode():
        found = fit(model, data, structure="diagonal", **LAST)
    stds = [posterior.approximation.covariances[0].std for posterior in (found, expected)]
    assert torch.equal(*stds)


def too_sure(num_labels: int = 3) -> Any:
    """A classifier whose labels are random, and whose logits are large."""
    model = tiny_bert(num_labels=num_labels)
    model.classifier.weight.data.mul_(100)
    return model


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(
    ("build", "data", "options", "prediction"),
    [
        (too_sure, label_rows(80), {"subspace": "last_layer"}, "linearised"),
        (lambda: with_lora(tiny_llama()), token_rows(12), {}, "members"),
    ],
    ids=["classes", "words"],
)
def test_held_out_rows_fit_a_temperature(
    build: Any, data: list[dict[str, Any]], options: dict[str, Any], prediction: str
) -> None:
    model, rows = build(), data[:6]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plain = fit(model, rows, prior_std=0.01, **options)
    found = fit(model, rows, prior_std=0.01, heldout=data, **options)
    assert posteriors.equal(dataclasses.replace(found, config=plain.config), plain)
    assert plain.config.calibration == {}
    assert found.config.calibration["prediction"] == prediction
    labelled = [{"labels" if name == "label" else name: value for name, value in row.items()} for row in data]
    base = build().unload() if options == {} else build()
    again = fit_calibration(plain, labelled, base_model=base).config.calibration
    assert again.pop("prediction") == prediction
    assert again == pytest.approx({name: found.config.calibration[name] for name in again}, rel=1e-5)
    if prediction == "linearised":
        assert again["temperature"] > 1.2
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:.*the draws are not better")
def test_rows_that_choose_the_prior_fit_a_temperature_too() -> None:
    chosen = {"fit_prior": "heldout", "subspace": "last_layer"}
    rows = label_rows(60, seed=5)
    posterior = fit(too_sure(), label_rows(20), heldout=rows, **chosen)
    assert posterior.config.calibration["num_terms"] == 60
    assert fit(too_sure(), label_rows(20), heldout=rows[:49], **chosen).config.calibration == {}
