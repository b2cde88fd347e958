"""From a finished model, or a trainer, to a posterior that saves, loads and predicts."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_bayes import (
    BayesianModelForCausalLM,
    BayesianModelForSequenceClassification,
    EnsembleConfig,
    LaplaceConfig,
    fit_laplace,
)
from hf_bayes.distributions.covariance import dense
from hf_bayes.fit import laplace as module
from hf_bayes.methods.laplace.supported import STRUCTURES
from hf_bayes.models.attaching import attach
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.tasks import TASKS
from tests import tiny_models as models
from tests.faults import posteriors
from tests.faults.corruptions import edit_json, sign
from tests.members.subjects import bert_tagger
from tests.runs import label_rows, padding_collator, token_rows, trainer
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora

NOISE = 0.5
STD = 2.0


def regression(rows: int = 12) -> tuple[Any, list[dict[str, Any]], Tensor, Tensor]:
    """A frozen encoder with a linear head of 5 parameters at its exact MAP; data, features [n, 5], labels [n]."""
    model = tiny_bert(dtype=torch.float64, num_labels=1, hidden_size=4)
    data = label_rows(rows)
    features: list[Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    for row in data:
        # as labels arrive: collators make float32 of them
        row["label"] = float(torch.tensor(math.sin(sum(row["input_ids"])), dtype=torch.float32))
        model(input_ids=torch.tensor([row["input_ids"]]))
    handle.remove()
    phi = torch.cat([torch.cat(features).detach(), torch.ones(rows, 1, dtype=torch.float64)], 1)
    y = torch.tensor([row["label"] for row in data], dtype=torch.float64)
    best = torch.linalg.solve(phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2, phi.T @ y / NOISE**2)
    model.classifier.weight.data, model.classifier.bias.data = best[None, :4].clone(), best[4:].clone()
    return model, data, phi, y


def fit(model: Any, data: Any, **changes: Any) -> Posterior:
    names = (
        "subspace",
        "collate",
        "noise_std",
        "num_data",
        "data_unit",
        "batch_size",
        "heldout",
        "seed",
    )
    options = {name: changes.pop(name) for name in names if name in changes}
    return fit_laplace(model, data, LaplaceConfig(**changes), **options)


LAST = {"subspace": "last_layer", "noise_std": NOISE, "prior_std": STD}


@pytest.mark.parametrize("num_samples", [None, 4000])
def test_full_laplace_is_exact_bayesian_linear_regression(num_samples: int | None) -> None:
    model, data, phi, y = regression()
    posterior = fit(model, data, structure="full", num_samples=num_samples, **LAST)
    precision = phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2
    found = dense(posterior.approximation.covariances[0], phi)
    expected = torch.linalg.inv(precision)
    # float64 throughout; drawn labels: 12 rows x 4000 draws
    tolerance = 1e-9 if num_samples is None else 5 / (12 * 4000) ** 0.5
    assert (found - expected).abs().max() / expected.abs().max() < tolerance
    assert torch.equal(posterior.approximation.means[0, :4], model.classifier.weight[0])
    (note,) = posterior.config.diagnostics["laplace"]
    assert note["displacement"] < 1e-5
    if num_samples is None:
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


def test_temperature_is_that_of_the_scale_page() -> None:
    model, data, phi, _ = regression()
    h, tau = phi.T @ phi / NOISE**2, torch.eye(5).double() / STD**2
    for temper, expected in (
        ("posterior", 0.2 * torch.linalg.inv(h + tau)),
        ("likelihood", torch.linalg.inv(h / 0.2 + tau)),
    ):
        posterior = fit(model, data, structure="full", num_samples=None, temperature=0.2, temper=temper, **LAST)
        found = dense(posterior.approximation.covariances[0], phi)
        assert (found - expected).abs().max() / expected.abs().max() < 1e-9  # float64 throughout


def test_evidence_finds_the_prior_that_exact_regression_finds() -> None:
    model, data, phi, y = regression()
    posterior = fit(model, data, structure="full", num_samples=None, fit_prior="evidence", **LAST)
    (note,) = posterior.config.diagnostics["laplace"]
    # theta* is held fixed, so this is one step of MacKay's alternation; repeat it until it stands still
    h, tau = phi.T @ phi / NOISE**2, torch.tensor(note["prior_precision"], dtype=torch.float64)
    best = torch.linalg.solve(h + torch.eye(5) / STD**2, phi.T @ y / NOISE**2)
    gamma = 5 - tau * torch.linalg.inv(h + tau * torch.eye(5)).trace()
    assert float(tau * best.square().sum()) == pytest.approx(float(gamma), rel=1e-4)


def test_learnt_noise_and_prior_maximise_the_evidence(tmp_path: Path) -> None:
    model, data, phi, _ = regression()
    rng = torch.Generator().manual_seed(3)
    y = phi @ torch.tensor([3.0, -2, 1, 0, 2]).double() + 0.3 * torch.randn(12, generator=rng, dtype=torch.float64)
    y = y.float().double()  # as labels arrive
    for row, label in zip(data, y.tolist(), strict=True):
        row["label"] = label
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of noise and prior std

    def minus_evidence() -> Tensor:
        noise, std = logs.exp()
        marginal = noise**2 * torch.eye(12) + std**2 * phi @ phi.T
        return -torch.distributions.MultivariateNormal(torch.zeros(12).double(), marginal).log_prob(y)

    optimizer = torch.optim.LBFGS([logs], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = minus_evidence()
        value.backward()
        return value

    optimizer.step(closure)
    noise, std = logs.detach().exp().tolist()
    best = torch.linalg.solve(phi.T @ phi / noise**2 + torch.eye(5) / std**2, phi.T @ y / noise**2)
    model.classifier.weight.data, model.classifier.bias.data = best[None, :4].clone(), best[4:].clone()
    posterior = fit(model, data, structure="full", num_samples=None, fit_prior="evidence", fit_noise=True,
                    subspace="last_layer", noise_std=2.0, prior_std=1.0)  # fmt: skip
    (note,) = posterior.config.diagnostics["laplace"]
    found = posterior.config.head["noise_std"]
    assert found == pytest.approx(noise, rel=1e-4)  # the prior's steps end at 1e-6 in its logarithm
    assert note["prior_precision"] == pytest.approx(std**-2, rel=1e-3)
    # steps in log tau end at 1e-6, and count squared where the evidence is largest
    assert note["log_evidence"] == pytest.approx(-float(minus_evidence()), abs=1e-8)
    residuals = float((y - phi @ best).square().mean().sqrt())
    assert abs(residuals / noise - 1) > 0.05  # the twin: as if no parameter had been fitted
    posterior.save_pretrained(tmp_path)
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=model).linearise()
    row = {key: torch.tensor([value]) for key, value in data[0].items() if key != "label"}
    spread = float(phi[0] @ dense(posterior.approximation.covariances[0], phi) @ phi[0])
    assert float(loaded(**row).predictive_std) == pytest.approx((found**2 + spread) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "ef_sequence"}, "needs estimator='ggn' or 'hessian', got 'ef_sequence'"),
        ({"temperature": 0.5}, "needs temperature=1 and strength=1, got 0.5 and 1"),
        ({"fit_prior": "heldout"}, "fit_noise=True and fit_prior='heldout' do not go together"),
    ],
)
def test_noise_without_an_evidence_is_refused(changes: dict[str, Any], message: str) -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match=message):
        fit(model, data, fit_noise=True, **{**LAST, **changes})


def test_noise_of_a_classifier_is_refused() -> None:
    with pytest.raises(ValueError, match="fit_noise=True is for regressions: this likelihood has no noise_std"):
        fit(with_lora(tiny_llama()), token_rows(2), fit_noise=True)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "keeps the diagonal" in str(one.message)]


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("structure", ["kronecker", "kronecker_corrected"])
def test_diagonal_parts_of_kfac_are_reported_once_with_reasons(structure: str) -> None:
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    with attach(model, subspace="last_block") as bayesian:
        sizes = bayesian.layout.sizes
        theta = bayesian.theta[:1].detach()
    chains = torch.cat([theta, 1.1 * theta])
    with attach(model, chains, subspace="last_block") as bayesian, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = fit(bayesian, label_rows(4), structure=structure, max_factor=5, prior_std=0.1)
    (text,) = told(caught)
    first, second = (note["diagonal"] for note in posterior.config.diagnostics["laplace"])
    assert first == second
    shapes = dict(zip(posterior.layout.names, posterior.layout.shapes, strict=True))
    size = sum(math.prod(shapes[name]) for name in first)
    assert f"keeps the diagonal of {len(first)} of {len(sizes)} tensors, with {size} of {sum(sizes)}" in text
    biases = [name for name in first if name.endswith("bias") and "LayerNorm" not in name]
    assert f"{len(biases)}: bias (first {biases[0]})" in text
    assert "4: no matrix product (norm or embedding) (first bert" in text
    assert "2: one side longer than max_factor=5: diagonal there (first bert" in text


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_prior_search_does_not_repeat_the_diagonal_report() -> None:
    model, rows = tiny_bert(num_labels=3, hidden_size=4), label_rows(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, rows, heldout=rows, fit_prior="heldout", structure="kronecker", subspace="last_layer")
    (text,) = told(caught)
    assert "1 of 2 tensors, with 3 of 15 parameters, in whole or on one side: 1: bias (first classifier.bias)" in text


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_complete_and_diagonal_structures_report_nothing(structure: str) -> None:
    part = "last_layer" if not structure.startswith("kronecker") else "classifier.weight"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tiny_bert(num_labels=3, hidden_size=4), label_rows(4), structure=structure, subspace=part, prior_std=0.1)
    assert told(caught) == []


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
    """Of three tokens, with a label for each, or 1 for all."""
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
            with_lora(tiny_llama()), rows, prior_std=1.0, data_unit=unit, collate=padding_collator()
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
    assert run.posterior.approximation.kind == "gaussian"


# -- bad input --------------------------------------------------------------------------------------------------------


def test_weights_that_are_no_map_are_told_so() -> None:
    model, data, *_ = regression()
    model.classifier.weight.data += 3.0
    with pytest.warns(
        UserWarning, match=r"the weights are no MAP: the gradient .* has norm .* standard deviations away"
    ):
        posterior = fit(model, data, structure="full", num_samples=None, **LAST)
    assert posterior.config.diagnostics["laplace"][0]["displacement"] > 1


def test_a_hessian_that_is_indefinite_is_refused_in_words() -> None:
    model = tiny_bert(dtype=torch.float64, num_labels=3, hidden_size=4, intermediate_size=6)
    with pytest.raises(ValueError, match=r"not positive definite .*its lowest eigenvalue is -.*estimator='ggn'"):
        fit(model, label_rows(4), estimator="hessian", structure="full", subspace="last_block", prior_std=100.0)


@pytest.mark.parametrize("changes", [{}, {"fit_prior": "evidence"}])
def test_a_prior_that_is_lost_in_rounding_is_refused_as_such(changes: dict[str, Any]) -> None:
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    with pytest.raises(
        ValueError, match=r"H \+ tau is not positive definite.*sum of squares.*lower prior_std, the jitter of this"
    ) as told:
        fit(model, label_rows(4), structure="full", subspace="last_block", prior_std=1e6, **changes)
    assert "Hessian" not in str(told.value)


@pytest.mark.parametrize("changes", [
    {"prior_std": 100.0}, {"prior_std": 100.0, "temper": "likelihood", "temperature": 0.5},
    {"prior_std": 100.0, "fit_prior": "evidence"},
], ids=["covariance", "tempered", "evidence"])  # fmt: skip
def test_refusals_without_a_minimum_name_the_gradient_norm(changes: dict[str, Any]) -> None:
    model = tiny_bert(dtype=torch.float64, num_labels=3, hidden_size=4, intermediate_size=6)
    where = {"subspace": "last_block"}
    with pytest.raises(ValueError, match=r"not positive definite.*train on.*jitter") as told:
        fit(model, label_rows(4), estimator="hessian", structure="full", **where, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {key: value for key, value in changes.items() if key != "fit_prior"}
        (note,) = fit(model, label_rows(4), **where, **others).config.diagnostics["laplace"]
    assert note["gradient_norm"] > 0.1
    assert f"has norm {note['gradient_norm']:.3g} here and 0 at a MAP: else train longer" in str(told.value)


def test_a_refusal_without_a_gradient_says_that_nobody_looked() -> None:
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    with pytest.raises(ValueError, match=r"not positive definite.*gradient was not computed: check_gradient=True"):
        fit(model, label_rows(4), structure="full", subspace="last_block", prior_std=1e6, check_gradient=False)


def test_weights_with_nan_are_refused() -> None:
    model, data, *_ = regression()
    model.classifier.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the log-likelihood at the given weights is not finite"):
        fit(model, data, **LAST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_data": -1.0}, "num_data must be finite and > 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"data_unit": "word"}, "data_unit must be one of"),
        ({"prior_mean": "initial"}, "a finished model no longer knows"),
        ({"noise_std": None}, "a regression head needs noise_std"),
    ],
)
def test_bad_arguments_are_refused_before_the_pass(changes: dict[str, Any], message: str) -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match=message):
        fit(model, data, **{**LAST, **changes})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(label_rows(2)),
            "data is a DataLoader, .* give data=loader.dataset .* collate=loader.coll",
        ),
        ((row for row in label_rows(2)), "data must have rows that can be .* asked for by number, got generator"),
        ({"train": label_rows(2)}, "asked for by number, got dict: .* one split"),
        (None, "asked for by number, got NoneType"),
        ([], "data has 0 rows"),
        ([{**row, "label": -100} for row in label_rows(2)], "no row of data has a likelihood term"),
        ([{**row, "label": 3} for row in label_rows(2)], r"row 0 of data has a label outside 0\.\.2"),
    ],
)
def test_data_that_are_no_rows_are_refused_by_their_name(data: Any, message: str) -> None:
    model, rows = tiny_bert(num_labels=3, hidden_size=4), label_rows(3)
    with pytest.raises(ValueError, match=message):
        fit(model, data, subspace="last_layer")
    if data is not None:
        with pytest.raises(ValueError, match=message.replace("data", "heldout", 1).replace("data=", "heldout=")):
            fit(model, rows, heldout=data, fit_prior="heldout", subspace="last_layer")


TOO_LARGE: list[tuple[str, str, dict[str, Any], str]] = [
    ("lm", "MAX_FULL", {"structure": "full"}, r"a matrix of \d+ x \d+; the limit is 20"),
    ("lm", "MAX_HESSIAN", {"estimator": "hessian"}, r"for each of \d+ elements; the limit is 20"),
    # rows of 4 and 6 tokens, in this order
    ("lm", "MAX_VJPS", {"num_samples": None}, "319 backward passes for each of 5 terms of a row, 1595 > 20"),
    ("classes", "MAX_VJPS", {"num_samples": None}, "29 backward passes for each of 1 terms of a row, 29 > 20"),
    ("regression", "MAX_VJPS", {"num_samples": None}, "30 backward passes for each of 1 terms of a row, 30 > 20"),
]


def too_large(task: str) -> dict[str, Any]:
    """A model, and rows of which the last is the longest."""
    if task == "lm":
        return {"model": with_lora(tiny_llama()), "train": token_rows([4, 4, 4, 6]), "collator": padding_collator()}
    rows = label_rows(4)
    if task == "regression":
        rows = [{**row, "label": [0.5] * 30} for row in rows]
    kind = {"problem_type": "regression"} if task == "regression" else {}
    model = tiny_bert(num_labels=30, hidden_size=4, **kind)
    noise = {"noise_std": NOISE} if task == "regression" else {}
    return {"model": model, "train": rows, "subspace": "last_layer", **noise}


class Watched(TrainerCallback):
    num_steps = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("task", "limit", "changes", "message"), TOO_LARGE)
def test_too_large_a_pass_is_refused_before_the_first_step(
    task: str, limit: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hf_bayes.methods.laplace.supported.{limit}", 20)
    watched = Watched()
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, LaplaceConfig(**changes), callbacks=[watched], **too_large(task)).train()
    assert watched.num_steps == 0
    trainer(tmp_path, LaplaceConfig(), callbacks=[watched], max_steps=1, **too_large(task)).train()
    assert watched.num_steps == 1  # the twin: it does see steps


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("task", "limit", "changes", "message"), TOO_LARGE)
def test_too_large_a_pass_is_refused_before_the_first_batch(
    task: str, limit: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hf_bayes.methods.laplace.supported.{limit}", 20)
    given = too_large(task)
    model, data, collator = given.pop("model"), given.pop("train"), given.pop("collator", None)
    calls: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=message):
        fit(model, data, batch_size=1, collate=collator, **changes, **given)
    assert calls == []
    fit(model, data, batch_size=1, collate=collator, **given)
    assert calls  # the twin: forwards are seen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "fisher"}, "estimator must be one of .*got 'fisher'"),
        ({"structure": "block"}, "structure must be one of .*got 'block'"),
        ({"sharing": "mean"}, "sharing must be one of"),
        ({"num_samples": 0}, "num_samples must be an integer >= 1, got 0"),
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"fit_prior": "nll"}, "fit_prior must be one of"),
        ({"prior_scope": "layer"}, "prior_scope must be one of"),
        ({"draws_per_chain": 2}, "a chain ends in one Gaussian"),
        (
            {"estimator": "hessian", "structure": "kronecker"},
            "there is no structure='kronecker' of estimator='hessian'",
        ),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaplaceConfig(**changes)


def test_held_out_halves_without_terms_are_refused() -> None:
    model, data = with_lora(tiny_bert()), label_rows(4)
    odd = [{**row, "label": -100} if number % 2 else row for number, row in enumerate(data)]
    for rows, half in ((odd, "odd"), (odd[1:], "even")):
        with pytest.raises(ValueError, match=f"the {half} rows of heldout hold no likelihood term, .* shuffle them"):
            fit(model, data, heldout=rows, fit_prior="heldout", prior_scope="tensor")
    fit(model, data, heldout=odd, fit_prior="heldout", check_gradient=False)  # one precision: all rows tell it


def test_noise_beside_a_model_that_has_its_own_is_refused() -> None:
    model, data, *_ = regression()
    words = rf"noise_std=2.0 is for a plain model: .* own \({NOISE}\)"
    with attach(model, subspace="last_layer", noise_std=NOISE) as bayesian, pytest.raises(ValueError, match=words):
        fit(bayesian, data, noise_std=2.0)
    with pytest.raises(ValueError, match=r"a regression head needs noise_std > 0, .* got 0"):
        fit(model, data, noise_std=0.0, fit_noise=True, subspace="last_layer")


def test_inference_mode_around_a_fit_changes_nothing() -> None:
    model, data, *_ = regression()
    expected = fit(model, data, **LAST)
    with torch.inference_mode():
        found = fit(model, data, **LAST)
    stds = [posterior.approximation.covariances[0].std for posterior in (found, expected)]
    assert torch.equal(*stds)


def test_another_method_is_refused() -> None:
    from hf_bayes import SGHMCConfig

    model, data, *_ = regression()
    with pytest.raises(ValueError, match="method must be a LaplaceConfig, got SGHMCConfig"):
        fit_laplace(model, data, SGHMCConfig(), subspace="last_layer", noise_std=NOISE)
    with pytest.raises(ValueError, match="method must be a LaplaceConfig, got str"):
        fit_laplace(model, data, "laplace", subspace="last_layer", noise_std=NOISE)  # type: ignore[arg-type]
