from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from hf_bayes import LaplaceConfig
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.supported import STRUCTURES
from hf_bayes.models.attaching import attach
from tests.fit.fitted import LAST, NOISE, STD, fit, regression, told
from tests.runs import label_rows
from tests.tiny_models import tiny_bert

pytestmark = pytest.mark.models


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
    assert "4: no matrix product (norm, embedding or convolution) (first bert" in text
    assert "2: one side longer than max_factor=5: diagonal there (first bert" in text


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("hidden_size", "warns"), [(64, True), (128, False)])
def test_a_few_biases_are_recorded_without_a_warning(hidden_size: int, warns: bool) -> None:
    """The three biases of a head are 1.5 % of its parameters with 64 features, and 0.8 % with 128."""
    model = tiny_bert(num_labels=3, hidden_size=hidden_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = fit(model, label_rows(4), structure="kronecker", subspace="last_layer")
    assert posterior.config.diagnostics["laplace"][0]["diagonal"] == {"classifier.bias": "bias"}
    assert bool(told(caught)) == warns


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
