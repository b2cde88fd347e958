"""One data set after another: the last posterior as the next prior."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, MeanFieldConfig, fit_laplace
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests.fit.fitted import NOISE, STD, regression
from tests.runs import label_rows, token_rows, trainer
from tests.tiny_models import tiny_bert, tiny_llama, tiny_tokenizer, with_lora

HEAD = {"subspace": "last_layer", "noise_std": NOISE}
EXACT = {"structure": "full", "num_samples": None}


def episodes() -> tuple[Any, list[list[dict[str, Any]]], Tensor, Tensor]:
    """A linear model of 12 rows in two episodes; the joint posterior's mean and precision, from all rows at once."""
    model, data, phi, y = regression()
    precision = phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2
    return model, [data[:7], data[7:]], torch.linalg.solve(precision, phi.T @ y / NOISE**2), precision


def precision_of(posterior: Posterior, like: Tensor) -> Tensor:
    return torch.linalg.inv(dense(posterior.approximation.covariances[0], like))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def run(model: Any, rows: Any, output: Path, prior: Any, steps: int = 700, **fields: Any) -> Posterior:
    """Full-batch AdamW to the MAP, and the pass."""
    made = trainer(
        output, LaplaceConfig(**(EXACT | fields)), model=model, train=rows, prior=prior, learning_rate=0.2,
        max_steps=steps, lr_scheduler_type="cosine", per_device_train_batch_size=len(rows), logging_steps=1000,
        map_updates=0, **HEAD,
    )  # fmt: skip
    made.train()
    made.save_model()
    made.bayesian.detach()
    return made.posterior


def test_two_episodes_are_the_joint_posterior(tmp_path: Path) -> None:
    model, parts, mean, precision = episodes()
    first = run(model, parts[0], tmp_path / "1", None, prior_std=STD)
    second = run(model, parts[1], tmp_path / "2", str(tmp_path / "1"))
    # AdamW's last steps are smaller than 1e-6; no label is in the precision
    assert relative(second.approximation.mean, mean) < 1e-6
    assert relative(precision_of(second, mean), precision) < 1e-9
    forgotten = Gaussian(torch.zeros(1, 5).double(), first.approximation.covariances)  # twin: precision without mean
    twin = run(model, parts[1], tmp_path / "3", dataclasses.replace(first, approximation=forgotten), 100)
    assert relative(twin.approximation.mean, mean) > 0.01
    alone = run(model, parts[1], tmp_path / "4", None, 100, prior_std=STD)  # twin: precision not accumulated
    assert relative(precision_of(alone, mean), precision) > 0.01
    saved = Posterior.from_pretrained(tmp_path / "2").config.prior
    assert saved["posterior"] == str(tmp_path / "1")
    assert saved["fingerprint"] == Posterior.from_pretrained(tmp_path / "1").fingerprint
    assert saved["prior"] == {"name": "gaussian", "std": STD, "mean": "zero"}


@pytest.mark.filterwarnings("ignore:the weights are no MAP")  # they are that of both episodes
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low_rank", "full"])
def test_each_structure_adds_lambda_times_the_curvature(structure: str) -> None:
    model, parts, mean, _ = episodes()
    common: dict[str, Any] = {"structure": structure, "num_samples": None}
    first = fit_laplace(model, parts[0], LaplaceConfig(prior_std=STD, **common), **HEAD)
    tau = torch.eye(5).double() / STD**2
    curvature = precision_of(fit_laplace(model, parts[1], LaplaceConfig(prior_std=STD, **EXACT), **HEAD), mean) - tau
    curvature = torch.diag(curvature.diagonal()) if structure == "diagonal" else curvature
    before = precision_of(first, mean)
    for strength in (1.0, 100.0):
        config = LaplaceConfig(strength=strength, **common)
        found = precision_of(fit_laplace(model, parts[1], config, prior=first, **HEAD), mean)
        expected, twin = before + strength * curvature, strength * (before + curvature)
        if structure == "kronecker":  # the episodes' eigenbases differ: the diagonal of the sum in one is kept
            found, expected, twin = found.trace(), expected.trace(), twin.trace()
        assert relative(found, expected) < 1e-9  # float64 throughout
        assert relative(found, twin) > 1e-3 or strength == 1


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_low_rank_episodes_grow_no_wider_than_asked() -> None:
    model, parts, mean, _ = episodes()
    found = {}
    for max_rank in (None, 1):
        config = LaplaceConfig(structure="low_rank", num_samples=None, max_rank=max_rank)
        posterior = fit_laplace(model, parts[0], dataclasses.replace(config, prior_std=STD), **HEAD)
        found[max_rank] = fit_laplace(model, parts[1], config, prior=posterior, **HEAD).approximation.covariances[0]
    assert found[1].basis.shape[1] == 1 < found[None].basis.shape[1]
    exact = precision_of(
        fit_laplace(model, [*parts[0], *parts[1]], LaplaceConfig(prior_std=STD, **EXACT), **HEAD), mean
    )
    for covariance in found.values():
        assert relative(covariance.precision_diagonal, exact.diagonal()) < 1e-9  # float64 throughout
    with pytest.raises(ValueError, match="max_rank=1 needs structure='low_rank', got 'full'"):
        LaplaceConfig(structure="full", max_rank=1)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_the_joint_map_has_zero_gradient_and_evidences_add_up() -> None:
    model, parts, *_ = episodes()
    first = fit_laplace(model, parts[0], LaplaceConfig(prior_std=STD, **EXACT), **HEAD)
    exact = Gaussian(torch.linalg.solve(*_normal_equations(parts[0]))[None], first.approximation.covariances)
    before = dataclasses.replace(first, approximation=exact)
    (note,) = fit_laplace(model, parts[1], LaplaceConfig(**EXACT), prior=before, **HEAD).config.diagnostics["laplace"]
    assert note["displacement"] < 1e-5
    *_, phi, y = regression()
    log_p = [
        torch.distributions.MultivariateNormal(
            torch.zeros(rows).double(), NOISE**2 * torch.eye(rows) + STD**2 * phi[:rows] @ phi[:rows].T
        ).log_prob(y[:rows])
        for rows in (7, 12)
    ]
    assert note["log_evidence"] == pytest.approx(float(log_p[1] - log_p[0]), abs=1e-9)  # p(D_2 | D_1), in float64


def _normal_equations(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    *_, phi, y = regression()
    phi, y = phi[: len(rows)], y[: len(rows)]
    return phi.T @ phi / NOISE**2 + torch.eye(5) / STD**2, phi.T @ y / NOISE**2


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_mean_field_after_mean_field_has_the_diagonal_of_the_sum(tmp_path: Path) -> None:
    model, parts, _, precision = episodes()
    stds = precision.diagonal().rsqrt()
    first = fit_laplace(model, parts[0], LaplaceConfig(prior_std=STD, num_samples=None), **HEAD)
    inner = _normal_equations(parts[0])[0]
    made = trainer(
        tmp_path, MeanFieldConfig(std_learning_rate=0.05), model=model, train=parts[1], prior=first, learning_rate=0.05,
        max_steps=600, per_device_train_batch_size=5, logging_steps=1000, map_updates=0, **HEAD,
    )  # fmt: skip
    made.train()
    prior_diagonal = first.approximation.covariances[0].precision_diagonal
    assert torch.allclose(prior_diagonal, inner.diagonal(), rtol=1e-5)
    # 300 averaged iterates; the noise of the diagonal part is gone, what is left is off the diagonal
    assert torch.allclose(made.posterior.approximation.stds[0], stds, rtol=0.05)
    assert not torch.allclose((1 / stds**2 - prior_diagonal).rsqrt(), stds, rtol=0.05)  # twin: no prior precision


# -- what becomes of draws ---------------------------------------------------------------------------------------


# -- the trainer on LoRA -----------------------------------------------------------------------------------------


def lora_posterior(output: Path, **changes: Any) -> Posterior:
    made = trainer(output, MeanFieldConfig(), max_steps=3, processing_class=tiny_tokenizer(), map_updates=0, **changes)
    made.train()
    made.save_model()
    return made.posterior


def test_draws_of_several_chains_warn_and_start_at_the_mean(tmp_path: Path, caplog: Any) -> None:
    made = trainer(tmp_path / "1", SGHMCConfig(num_chains=2), max_steps=2, map_updates=0)
    made.train()
    with caplog.at_level(logging.WARNING):
        again = trainer(tmp_path / "2", MAPConfig(), prior=made.posterior, max_steps=2)
    assert "not a model of any chain" in caplog.text
    assert torch.equal(again.bayesian.theta[0], made.posterior.approximation.mean)


def test_a_run_with_a_prior_resumes_bitwise_with_that_prior_only(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=2)
    prior = lora_posterior(tmp_path / "prior")
    other = lora_posterior(tmp_path / "other", seed=1)
    options: dict[str, Any] = {"prior": prior, "max_steps": 6, "map_updates": 0}
    whole = trainer(tmp_path / "whole", method, save_strategy="steps", save_steps=3, **options)
    whole.train()
    rest = trainer(tmp_path / "rest", method, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(whole.posterior.representative, rest.posterior.representative)
    with pytest.raises(ValueError, match=f"prior: saved '{prior.fingerprint}', now '{other.fingerprint}'"):
        trainer(tmp_path / "rest", method, **{**options, "prior": other}).train(
            resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
        )


def other(seed: int = 0, rope_theta: float = 10000.0, **lora: Any) -> Any:
    return lambda: with_lora(
        tiny_llama(seed=seed, rope_parameters={"rope_type": "default", "rope_theta": rope_theta}), **lora
    )


BOTH = r"fingerprint \w{12}, expected \w{12}\)"
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"model": other(seed=5)}, r"other weights \(weights " + BOTH),
    "config": ({"model": other(rope_theta=7.0)}, r"architecture or configuration \(config " + BOTH),
    "rank": ({"model": other(r=3)}, r"lora_A.default.weight has shape \[3, 16\] here and shape \[2, 16\]"),
    "targets": ({"model": other(target_modules=["q_proj"])}, "has no such parameter here and shape"),
    "alpha": ({"model": other(lora_alpha=8)}, "lora_alpha=4, this adapter 8"),
    "tokenizer": (
        {"processing_class": tiny_tokenizer(("abc abd",))},
        r"\(fingerprint \w{12}\) is not the one .* \(\w{12}\)",
    ),
    "unit": ({"data_unit": "sequence"}, "counts each token as a datum, this run each sequence"),
    "std": ({"method": MAPConfig(prior_std=1.0)}, "are two priors"),
    "mean": ({"method": MAPConfig(prior_mean="initial")}, "are two priors"),
    "scale": ({"method": MAPConfig(prior_scale=2.0)}, "prior_scale=2.0 and another posterior are two priors"),
    "evidence": ({"method": LaplaceConfig(fit_prior="evidence")}, "would replace the posterior that is the prior"),
}


@pytest.fixture(scope="module")
def inherited(tmp_path_factory: Any) -> Posterior:
    return lora_posterior(tmp_path_factory.mktemp("prior"))


@pytest.mark.parametrize("case", REFUSALS)
def test_a_prior_of_something_else_is_refused(case: str, inherited: Posterior, tmp_path: Path) -> None:
    changes, message = REFUSALS[case]
    changes = {"method": MAPConfig(), **changes}
    if "model" in changes:
        changes["model"] = changes["model"]()
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, changes.pop("method"), prior=inherited, **changes).train()


def test_a_run_never_overwrites_its_prior(inherited: Posterior, tmp_path: Path) -> None:
    place = tmp_path / "one"
    inherited.save_pretrained(place)
    (tmp_path / "link").symlink_to(place)
    fingerprint = Posterior.from_pretrained(place).fingerprint
    for prior in (place, str(place), Posterior.from_pretrained(place)):
        for output in (place, tmp_path / "link"):
            with pytest.raises(ValueError, match=r"holds the posterior that is the prior .* Choose another output_dir"):
                trainer(output, MAPConfig(), prior=prior)
    made = trainer(tmp_path / "two", MAPConfig(), prior=place, max_steps=2, map_updates=0)
    made.train()
    with pytest.raises(ValueError, match=r"holds the posterior that is the prior"):
        made.save_model(str(place))
    made.save_model()
    assert Posterior.from_pretrained(place).fingerprint == fingerprint
    assert Posterior.from_pretrained(tmp_path / "two").config.prior["fingerprint"] == fingerprint


def test_a_trainer_as_prior_is_told_to_give_its_posterior(tmp_path: Path) -> None:
    first = trainer(tmp_path / "1", MAPConfig())
    with pytest.raises(ValueError, match=r"a directory or a repository id, got BayesianTrainer: give its \.posterior$"):
        trainer(tmp_path / "2", MAPConfig(), prior=first)
    with pytest.raises(ValueError, match=r"a directory or a repository id, got int$"):
        Posterior.from_pretrained(3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_prior_that_has_a_tokenizer_warns_a_run_that_has_none(
    inherited: Posterior, tmp_path: Path, caplog: Any
) -> None:
    said = r"made with a tokenizer \(fingerprint \w{12}\), and this run was given none to compare"

    def warned(prior: Posterior, tokenizer: Any) -> list[bool]:
        found = []
        for start in (
            lambda: trainer(tmp_path, MAPConfig(), prior=prior, processing_class=tokenizer),
            lambda: fit_laplace(with_lora(tiny_llama()), token_rows(2), prior=prior, tokenizer=tokenizer),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                start()
            found.append(re.search(said, caplog.text) is not None)
        return found

    assert warned(inherited, None) == [True, True]
    assert warned(inherited, tiny_tokenizer()) == [False, False]
    base = inherited.config.base_model
    base = {**base, "fingerprint": {**base["fingerprint"], "tokenizer": None}}
    config = dataclasses.replace(inherited.config, base_model=base)
    assert warned(dataclasses.replace(inherited, config=config), None) == [False, False]  # there is none to miss


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_prior_of_another_task_is_refused() -> None:
    model, parts, *_ = episodes()
    posterior = fit_laplace(model, parts[0], LaplaceConfig(prior_std=STD), **HEAD)
    config = dataclasses.replace(posterior.config, task="token_classification")
    with pytest.raises(ValueError, match="is for token_classification, this model for sequence_classification"):
        fit_laplace(model, parts[1], LaplaceConfig(), prior=dataclasses.replace(posterior, config=config), **HEAD)
    with pytest.raises(ValueError, match="would replace the posterior that is the prior"):
        fit_laplace(model, parts[1], LaplaceConfig(fit_prior="heldout"), prior=posterior, heldout=parts[0], **HEAD)


NAMED = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NAMED, None),
        ({}, None),  # the labels have no names
        (
            {"id2label": {0: "yes", 1: "maybe", 2: "no"}},
            r"\['yes', 'maybe', 'no'\], expected \['no', 'maybe'",
        ),
        (
            NAMED | {"problem_type": "multi_label_classification"},
            "'multi_label_classification', expected 'single",
        ),
    ],
)
def test_a_prior_of_a_head_for_other_labels_is_refused(config: Any, words: str | None) -> None:
    def fitted(prior: Posterior | None, **config: Any) -> Posterior:
        method = LaplaceConfig(structure="diagonal", prior_std=None if prior else 0.1)
        return fit_laplace(with_lora(tiny_bert(**config)), label_rows(), method, prior=prior)

    first = fitted(None, **NAMED)
    if words is None:
        assert fitted(first, **config).config.prior["fingerprint"] == first.fingerprint
        return
    with pytest.raises(ValueError, match=words):
        fitted(first, **config)


def test_a_prior_with_another_likelihood_is_refused() -> None:
    def fitted(prior: Posterior | None, likelihood: Any) -> Posterior:
        method = LaplaceConfig(structure="diagonal", estimator="ef_token", prior_std=None if prior else 0.1)
        rows = [row | {"weight": 1.0} for row in label_rows()] if isinstance(likelihood, Weighted) else label_rows()
        return fit_laplace(with_lora(tiny_bert(**NAMED)), rows, method, prior=prior, likelihood=likelihood)

    ordinal, plain = fitted(None, Ordinal(num_classes=4)), fitted(None, None)
    with pytest.raises(ValueError, match="trained with likelihood=ordinal, and this run has likelihood=None"):
        fitted(ordinal, None)
    with pytest.raises(ValueError, match="trained with likelihood=None, and this run has likelihood=ordinal"):
        fitted(plain, Ordinal(num_classes=4))
    assert fitted(fitted(None, Weighted()), None).config.prior is not None  # weights do not change what outputs mean
