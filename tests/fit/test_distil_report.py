"""The held-out report of a student."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_bayes.fit.distil_report import auroc, predictions_of, rank_correlation, report_of
from hf_bayes.posteriors.student import check_description
from hf_bayes.uncertainty.student_head import StudentHead
from tests.fit.test_distil_training import targets_of
from tests.posteriors.test_student import DESCRIPTION


def test_ranks_decide_on_the_correlation() -> None:
    x = torch.tensor([0.1, 0.5, 0.2, 3.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)


def test_larger_values_elsewhere_give_an_area_above_a_half() -> None:
    assert auroc(torch.tensor([0.1, 0.3]), torch.tensor([0.2, 0.4])) == 0.75


def test_the_report_of_the_teacher_itself_is_perfect() -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(5, 4), torch.randn(60, 4)
    head = StudentHead(4, 2, share=0.3)
    targets = targets_of((hidden @ weight.T).log_softmax(-1), hidden, torch.full((60,), 0.3))
    found = report_of(targets, head, lambda h: h @ weight.T, targets._replace(row=torch.arange(60) // 2))
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    for name in ("total_correlation", "epistemic_correlation", "epistemic_ratio"):
        assert found[name] == pytest.approx(1, abs=1e-3)
    assert found["auroc"] == pytest.approx(found["teacher_auroc"], abs=0.01)
    assert len(predictions_of(head, targets, lambda h: h @ weight.T).log_probs) == 60


@pytest.mark.parametrize("epistemic", [0.0, 0.2])
def test_figures_that_are_not_defined_are_none(epistemic: float) -> None:
    """Every held-out term has the same uncertainties, so that no order of them is right; without EU it has no ratio."""
    hidden = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    log_probs = torch.tensor([0.7, 0.2, 0.1]).log().expand(20, 3)
    targets = targets_of(log_probs, hidden, torch.full((20,), epistemic))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = report_of(targets, StudentHead(4, 2), lambda h: h[:, :3], targets)
    undefined = {name for name, value in found.items() if value is None}
    assert undefined == {"total_correlation", "epistemic_correlation"} | (set() if epistemic else {"epistemic_ratio"})
    check_description(DESCRIPTION | {"report": found})
