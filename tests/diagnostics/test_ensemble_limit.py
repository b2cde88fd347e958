from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.ensemble_limit import risk_asymptote


def members(count: int, terms: int = 4000) -> tuple[torch.Tensor, float]:
    """Return [n, 1, M] log-likelihoods of members that are independent given the data, and the risk of all such."""
    mean = 1 + torch.randn(terms, 1, generator=generator("terms"), dtype=torch.float64)
    logits = mean + 1.5 * torch.randn(terms, count, generator=generator("draws"), dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    probabilities = 1 / (1 + np.exp(-(mean.numpy() + 1.5 * nodes)))
    truth = -np.log(probabilities @ (weights / weights.sum())).mean()
    return torch.nn.functional.logsigmoid(logits)[:, None], float(truth)


def test_the_asymptote_is_the_risk_of_infinitely_many_members() -> None:
    log_lik, truth = members(24, terms=8000)
    found = risk_asymptote(log_lik, list(range(24)))
    assert found is not None
    assert found.sizes == list(range(1, 25))
    assert found.risks[0] == pytest.approx(-log_lik.mean().item(), rel=0.03)  # 16 of 24 members
    assert found.risks[-1] == pytest.approx(-(log_lik.logsumexp(-1) - math.log(24)).mean().item())
    assert abs(found.limit - truth) < 4 * found.std_error
    assert found.std_error < 0.01
    assert abs(found.risks[-1] - truth) > 4 * found.std_error  # the twin: C(M) taken for C(infinity)


def test_the_error_of_the_asymptote_counts_chains_not_draws() -> None:
    log_lik, _ = members(8, terms=1000)
    one = risk_asymptote(log_lik.repeat_interleave(4, -1), [k for k in range(8) for _ in range(4)])
    wrong = risk_asymptote(log_lik.repeat_interleave(4, -1), list(range(32)))
    assert one is not None
    assert wrong is not None
    assert one.std_error > wrong.std_error


def test_few_members_and_impossible_labels_have_no_asymptote() -> None:
    log_lik, _ = members(8, terms=10)
    assert risk_asymptote(log_lik[..., :7], list(range(7))) is None
    assert risk_asymptote(torch.cat([log_lik, torch.full((1, 1, 8), -math.inf)]), list(range(8))) is None


def test_each_part_of_a_term_has_a_mixture_of_its_own() -> None:
    log_lik, _ = members(8, terms=1000)
    parts = log_lik.view(500, 2, 8)
    found = risk_asymptote(parts, list(range(8)))
    assert found is not None
    alone = risk_asymptote(log_lik, list(range(8)))
    assert alone is not None
    assert found.risks == pytest.approx([2 * risk for risk in alone.risks], rel=1e-12)
    joint = -(parts.sum(1).logsumexp(-1) - math.log(8)).mean()
    assert abs(found.risks[-1] - joint) > 1e-3  # the twin: members that predict both parts together
