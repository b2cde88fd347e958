"""The figures of the page about single passes: members in groups, the noise of a reference, the errors of means."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.uncertainty.decomposition import decompose
from scripts.reproduce import single_pass_means
from scripts.reproduce.single_pass_ranks import Group, area, epistemic, limit
from scripts.reproduce.single_pass_scores import of_log_probs


def test_epistemic_uncertainty_of_groups_is_that_of_all_members() -> None:
    logits = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    wanted = decompose(logits).epistemic
    groups = [
        Group(
            len(some), some.logsumexp(0) - torch.tensor(len(some)).log(), torch.special.entr(some.exp()).sum(-1).mean(0)
        )
        for some in logits.split((2, 4, 6))
    ]
    assert (epistemic(groups) - wanted).abs().max() < 1e-7  # the logarithm of a count is in float32
    assert (epistemic(groups[:2]) - wanted).abs().max() > 1e-3


def test_limit_is_one_for_halves_without_noise() -> None:
    values = torch.arange(20.0)
    assert limit(values, values) == 1
    assert limit(values, values.flip(0)) == 0
    noisy = values + 8 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert 0.3 < limit(values, noisy) < 1


def test_area_is_one_if_all_other_text_is_less_certain() -> None:
    values = {"held out": torch.arange(4.0), "other": torch.arange(4.0, 7.0)}
    assert area(values) == 1
    assert area({"held out": values["other"], "other": values["held out"]}) == 0


def test_scores_of_tokens_are_those_of_the_token_before() -> None:
    labels = torch.tensor([[0, 1, 2]])
    probs = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = of_log_probs(probs.log(), [{"labels": labels}], is_causal=True)
    assert found["correct"].tolist() == [1, 0]
    assert found["confidence"].tolist() == pytest.approx([0.7, 0.6])
    assert found["nll"].tolist() == pytest.approx((-torch.tensor([0.7, 0.1]).log()).tolist())


def test_the_mean_is_exact_if_all_modules_add_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_pass_means, "DRAWS", 40)
    found = single_pass_means.errors_of("llama")
    assert found["all"] == 0  # rounded to three digits
    assert found["none"] > 0.05
