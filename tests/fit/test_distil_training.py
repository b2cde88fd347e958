"""The loss of a student."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.fit.distil_targets import Targets
from hf_bayes.fit.distil_training import deviance, kl, train
from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty
from hf_bayes.uncertainty.student_head import entropy


def mixture(rows: int = 5, num_classes: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, num_classes, generator=generator)).log_softmax(-1)


def targets_of(log_probs: torch.Tensor, hidden: torch.Tensor, share: torch.Tensor, kept: int | None = None) -> Targets:
    top, classes = log_probs.topk(kept or log_probs.shape[-1], -1)
    total = entropy(log_probs)
    return Targets(hidden, classes, top, total * (1 - share), total * share, torch.arange(len(hidden)))


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def test_kl_of_all_classes_is_the_divergence() -> None:
    p, q = mixture(), mixture(seed=1)
    found = kl(targets_of(p, p, torch.zeros(5)), Prediction(q, Uncertainty(*[entropy(q)] * 3)))
    torch.testing.assert_close(found, divergence(p, q))


def test_kl_of_some_classes_counts_the_rest_as_one() -> None:
    p, q = mixture(), mixture(seed=1)
    found = kl(targets_of(p, p, torch.zeros(5), kept=4), Prediction(q, Uncertainty(*[entropy(q)] * 3)))
    order = p.topk(12, -1).indices

    def merged(x: torch.Tensor) -> torch.Tensor:
        x = x.gather(-1, order)
        return torch.cat([x[:, :4], x[:, 4:].logsumexp(-1, keepdim=True)], -1)

    torch.testing.assert_close(found, divergence(merged(p), merged(q)))
    assert bool((found <= divergence(p, q)).all())


def test_the_deviance_is_least_at_the_mean() -> None:
    value = torch.tensor([0.1, 0.2, 0.6])  # of mean 0.3
    at = {x: float(deviance(value, torch.full((3,), x), 0.0).mean()) for x in (0.2, 0.29, 0.3, 0.31, 0.5)}
    assert min(at, key=at.__getitem__) == pytest.approx(0.3)
    torch.testing.assert_close(deviance(value, value, 1e-5), torch.zeros(3))


def test_training_finds_a_disagreement_that_the_state_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(800, 8, generator=generator)
    weight = torch.randn(12, 8, generator=generator)
    hidden = torch.nn.functional.layer_norm(hidden, (8,))
    share = 0.1 + 0.8 * torch.sigmoid(3 * hidden[:, 0])
    found = targets_of((0.7 * hidden @ weight.T).log_softmax(-1), hidden, share)
    head = train(found.at(torch.arange(700)), found.at(torch.arange(700, 800)), lambda h: h @ weight.T, width=32,
                 seed=0, progress=False)  # fmt: skip
    rest = found.at(torch.arange(700, 800))
    log_probs, (total, _, epistemic) = head(rest.hidden, lambda h: h @ weight.T)
    assert rank_correlation(epistemic / total, share[700:]) > 0.95
    assert float(kl(rest, Prediction(log_probs, Uncertainty(total, total, total))).mean()) < 0.02
