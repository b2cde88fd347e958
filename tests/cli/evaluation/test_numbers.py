from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm, poisson

from hf_bayes.cli.evaluation.numbers import NUMBER_CASE, OWN_NUMBER_CASE, scored_numbers
from hf_bayes.metrics.evaluation import evaluation_results
from hf_bayes.metrics.figures import OWN_NUMBERS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictives.custom import of_gaussian
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.likelihoods import Normal
from tests.cli.evaluated import NUM_ROWS, SENTENCES, found_by, inputs_of, members_of, write_rows
from tests.tiny_models import tiny_bert

NOISE = 0.5
LABELS = [0.3 * i - 1 for i in range(NUM_ROWS)]


@pytest.fixture
def model() -> BayesianModel:
    return members_of(tiny_bert(num_labels=1), noise_std=NOISE)


def test_scores_are_those_of_a_mixture_of_normals(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(NUMBER_CASE, model, write_rows(tmp_path, LABELS), ["LABEL_0"])
    with torch.no_grad():
        means = torch.cat([model.member_logits(inputs_of(text)) for text in SENTENCES], 1)[..., 0].double().numpy()
    expected: dict[str, Any] = {
        "prediction": means.mean(0),
        "label": LABELS,
        "below": norm.cdf(LABELS, means, NOISE).mean(0),
        "nll": -torch.tensor(norm.pdf(LABELS, means, NOISE).mean(0)).log().numpy(),
        "epistemic_std": means.std(0),
        "predictive_std": (means.var(0) + NOISE**2) ** 0.5,
    }
    for name, values in expected.items():
        assert found["test"][name][:, 0] == pytest.approx(values, abs=1e-4), name
    assert found["other"]["epistemic_std"][:, 0] == pytest.approx(means.std(0)[:5], abs=1e-5)
    assert set(found["other"]) == {"epistemic_std", "predictive_std"}


def test_each_of_several_outputs_is_a_term(tmp_path: Path) -> None:
    model = members_of(tiny_bert(num_labels=2, problem_type="regression"), noise_std=NOISE)
    found = found_by(NUMBER_CASE, model, write_rows(tmp_path, [[x, -x] for x in LABELS]), ["LABEL_0", "LABEL_1"])
    assert {name: values.shape for name, values in found["test"].items()} == {
        "nll": (7, 1), "member_nll": (7, 1), "label": (7, 2), "prediction": (7, 2), "below": (7, 2),
        "predictive_std": (7, 2), "epistemic_std": (7, 2),
    }  # fmt: skip


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, model: BayesianModel) -> None:
    files = write_rows(tmp_path, [*LABELS[:-1], math.nan])
    with pytest.raises(ValueError, match=r"line 7 of .*test.jsonl has the label nan, expected a finite number: drop"):
        found_by(NUMBER_CASE, model, files, ["LABEL_0"])


def test_gaussian_outputs_are_scored_without_members() -> None:
    found = scored_numbers(of_gaussian(torch.zeros(1, 4, 1), torch.ones(1, 4, 1), Normal(1.0), "probit"), torch.ones(4))
    assert "member_nll" not in found
    assert found["nll"].numpy() == pytest.approx(-norm.logpdf([1] * 4, 0, math.sqrt(2)))
    assert found["below"][:, 0].numpy() == pytest.approx(norm.cdf([1] * 4, 0, math.sqrt(2)))


COUNTS = [1 + i % 3 for i in range(NUM_ROWS)]


def test_counts_are_scored_under_the_mixture_of_their_likelihood(tmp_path: Path) -> None:
    model = members_of(tiny_bert(num_labels=1), likelihood=Poisson())
    found = found_by(OWN_NUMBER_CASE, model, write_rows(tmp_path, COUNTS), ["0"])
    with torch.no_grad():
        rates = (
            torch.cat([model.member_logits(inputs_of(text)) for text in SENTENCES], 1)[..., 0].double().exp().numpy()
        )
    expected: dict[str, Any] = {
        "prediction": rates.mean(0), "label": COUNTS, "aleatoric_std": rates.mean(0) ** 0.5,
        "nll": -torch.tensor(poisson.pmf(COUNTS, rates).mean(0)).log().numpy(), "epistemic_std": rates.std(0),
        "predictive_std": (rates.var(0) + rates.mean(0)) ** 0.5,
    }  # fmt: skip
    for name, values in expected.items():
        assert found["test"][name][:, 0] == pytest.approx(values, rel=1e-4), name
    assert set(found["other"]) == {"predictive_std", "aleatoric_std", "epistemic_std"}
    results = evaluation_results(found["test"], {"other": found["other"]}, OWN_NUMBERS)
    assert set(results["auroc"]["other"]) == {"predictive_std", "epistemic_std"}


def test_a_label_outside_of_the_support_is_refused(tmp_path: Path) -> None:
    model = members_of(tiny_bert(num_labels=1), likelihood=Poisson())
    with pytest.raises(ValueError, match="the counts 0, 1, 2"):
        found_by(OWN_NUMBER_CASE, model, write_rows(tmp_path, [0.5] * NUM_ROWS), ["0"])
