from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from hf_bayes.core.layout import select
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.attaching import attach
from hf_bayes.models.predictives.built_in import GaussianNumbers, MemberNumbers, of_head_gaussian
from hf_bayes.uncertainty.gaussian_links import LINKS
from hf_bayes.uncertainty.likelihoods import Normal
from hf_bayes.uncertainty.several_labels import Bernoulli, decompose_labels
from tests import runs
from tests.members.reference import scattered, separate_logits
from tests.models.trained import run
from tests.tiny_models import batch, tiny_bert


def _classifier(problem: str, num_labels: int) -> tuple[nn.Module, Any, Tensor, Tensor]:
    model = tiny_bert(dtype=torch.float64, num_labels=num_labels, problem_type=problem)
    layout = select(model, "last_block")
    theta = scattered(model, layout)
    return model, layout, theta, separate_logits(model, layout, theta, batch())


@pytest.mark.parametrize("num_labels", [1, 2])
def test_regression_has_a_normal_likelihood_of_known_noise(num_labels: int) -> None:
    model, _, theta, logits = _classifier("regression", num_labels)
    labels = torch.randn(3) if num_labels == 1 else torch.randn(3, 2)
    normal = torch.distributions.Normal(logits, 0.5).log_prob(labels.double().view(3, num_labels)).sum(-1)
    with torch.no_grad(), attach(model, theta, subspace="last_block", noise_std=0.5) as bayesian:
        result = bayesian(**batch(), labels=labels, theta=theta)
        output = bayesian(**batch(), labels=labels)
        statistics, kept = bayesian.evaluate_batch({**batch(), "labels": labels}, keep_logits=True)
    torch.testing.assert_close(result.loss, -normal.sum(1), rtol=1e-10, atol=0)
    assert result.num_terms.tolist() == [3, 3, 3]
    mixture_nll = math.log(3) - normal.logsumexp(0)
    torch.testing.assert_close(statistics["nll"], mixture_nll, rtol=1e-10, atol=0)
    std = (logits.var(0, unbiased=False) + 0.25).sqrt()
    covered = ((labels.double().view(3, num_labels) - logits.mean(0)).abs() <= std).double().mean(1)
    assert torch.equal(statistics["covered"], covered)
    torch.testing.assert_close(output.loss, mixture_nll.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(output.logits, logits.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kept, output.logits)
    assert output.total is None


def test_several_labels_have_bernoulli_likelihoods() -> None:
    model, _, theta, logits = _classifier("multi_label_classification", 4)
    labels = (torch.arange(12).view(3, 4) % 3 == 0).double()
    bernoulli = torch.distributions.Bernoulli(logits=logits).log_prob(labels).sum(-1)
    with torch.no_grad(), attach(model, theta, subspace="last_block") as bayesian:
        result = bayesian(**batch(), labels=labels, theta=theta)
        output = bayesian(**batch(), labels=labels)
        statistics, _ = bayesian.evaluate_batch({**batch(), "labels": labels})
    torch.testing.assert_close(result.loss, -bernoulli.sum(1), rtol=1e-10, atol=0)
    assert result.num_terms.tolist() == [3, 3, 3]
    mixture = torch.distributions.Bernoulli(probs=logits.sigmoid().mean(0)).log_prob(labels).sum(-1)
    torch.testing.assert_close(output.loss, -mixture.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(output.logits, logits.sigmoid().mean(0).logit(), rtol=1e-8, atol=1e-10)
    for name, value in decompose_labels(logits)._asdict().items():
        torch.testing.assert_close(getattr(output, name), value, rtol=0, atol=1e-10)
        torch.testing.assert_close(statistics[name], value, rtol=0, atol=1e-10)


def test_a_certain_label_keeps_a_finite_logit() -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    with torch.no_grad():
        model.classifier.bias.fill_(100.0)  # its probability rounds to 1
        expected = model(**batch()).logits
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        torch.testing.assert_close(bayesian(**batch()).logits, expected, rtol=1e-5, atol=0)


def numbered_rows(outputs: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = runs.label_rows(6, seed=seed)
    values = torch.randn((6, outputs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{**row, "label": value if outputs > 1 else value[0]} for row, value in zip(rows, values, strict=True)]


def test_predictive_std_is_that_of_draws_of_labels() -> None:
    model = tiny_bert(dtype=torch.float64, num_labels=1)
    theta = scattered(model, select(model, "last_layer"), num_members=8)
    with torch.no_grad(), attach(model, theta, subspace="last_layer", noise_std=0.5) as bayesian:
        output = bayesian(**batch())
        means = bayesian.member_logits(batch())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((8, 20_000, 3, 1), generator=generator, dtype=torch.float64)
    drawn = (means[:, None] + 0.5 * noise).flatten(0, 1)
    # the relative error of the standard deviation of n draws is sqrt((kurtosis - 1) / 4n): 4 of them at n = 160,000,
    # where the kurtosis of 8 equally likely numbers is below 6.2 and Gaussian noise brings it nearer to 3
    torch.testing.assert_close(output.predictive_std, drawn.std(0), rtol=4 * math.sqrt(5.2 / 640_000), atol=0)
    assert ((output.epistemic_std + 0.5) / drawn.std(0) > 1.02).all()  # the twin: standard deviations do not add


def test_predictions_without_labels_are_means_alone(tmp_path: Path) -> None:
    trainer = run(tmp_path, tiny_bert(num_labels=1), numbered_rows(1), numbered_rows(1), subspace="last_layer",
                  noise_std=0.5)  # fmt: skip
    rows = [{key: value for key, value in row.items() if key != "label"} for row in numbered_rows(1)]
    without = trainer.predict(Dataset.from_list(rows)).predictions
    np.testing.assert_allclose(without, trainer.predict(Dataset.from_list(numbered_rows(1))).predictions, atol=1e-6)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_gaussian_labels_sum_the_uncertainties_of_each(link: str, full: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn((2, 5, 3), generator=generator, dtype=torch.float64)  # two components
    root = 0.5 * torch.randn((2, 5, 3, 3), generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    found = of_head_gaussian(mean, covariance if full else variance, Bernoulli(), link)
    normal = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)  # quantiles as members
    members = (mean[:, None] + variance[:, None].sqrt() * normal.view(1, -1, 1, 1)).flatten(0, 1)
    exact = decompose_labels(members)._asdict()
    # the error of one label at variances of 1 to 10, by the tables of docs/uncertainty.md; epistemic is 0.13 to 0.41
    tolerance = {"monte_carlo": 0.004, "probit": 0.005, "bridge": 0.03}[link]
    assert set(found.parts) == ({"total"} if link == "probit" else set(exact))
    for name, value in found.parts.items():
        torch.testing.assert_close(value, exact[name], rtol=0, atol=3 * tolerance)
    nll = found.statistics(torch.ones(5, 3))
    assert {"nll", *found.parts} == set(nll)


def test_the_probability_below_a_label_is_that_of_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn((4, 6, 1), generator=generator), torch.randn(6, generator=generator)
    normal = torch.distributions.Normal(logits[..., 0], 0.5)
    found = MemberNumbers(logits, Normal(0.5), LocalMembers()).below(labels)
    torch.testing.assert_close(found[:, 0], normal.cdf(labels).mean(0))
    variance = torch.rand((4, 6, 1), generator=generator)
    normal = torch.distributions.Normal(logits, (variance + 0.25).sqrt())
    for covariance in (variance, variance[..., None]):
        gaussian = GaussianNumbers(logits, covariance, Normal(0.5)).below(labels)
        torch.testing.assert_close(gaussian, normal.cdf(labels[:, None]).mean(0))
