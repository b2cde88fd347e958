from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import BayesianModelForSequenceClassification
from hf_bayes.distributions.covariance import dense
from tests.fit.fitted import LAST, fit, regression
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora

pytestmark = pytest.mark.models


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
