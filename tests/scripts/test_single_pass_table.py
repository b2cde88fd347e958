"""The figures of the table of single passes on real text: paired errors, mixtures of groups, batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.reproduce.single_pass_ranks import Group
from scripts.reproduce.single_pass_table import mean_and_error
from scripts.reproduce.single_pass_table_cells import batches, fitted_prior, mixture
from scripts.reproduce.single_pass_table_scores import Found, scores


def test_the_error_of_a_difference_has_rows_and_seeds() -> None:
    resampled = [np.array([1.0, 3.0]), np.array([3.0, 5.0])]  # means over seeds 2 and 4: deviation 1
    mean, error = mean_and_error([2.0, 4.0], resampled)
    assert mean == 3
    assert error == pytest.approx(2**0.5)  # of rows 1, of the mean of two seeds 1
    assert mean_and_error([2.0], resampled[:1]) == (2, pytest.approx(1.0))


def test_a_mixture_weighs_groups_by_their_members() -> None:
    groups = [
        Group(1, torch.tensor([[0.9, 0.1]]).log(), torch.tensor([0.3])),
        Group(3, torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.5])),
    ]
    assert mixture(groups).log_probs.exp()[0].tolist() == pytest.approx([0.6, 0.4])


def test_batches_hold_all_rows_without_shared_padding() -> None:
    rows = [
        {"input_ids": [7] * n + [0] * (4 - n), "attention_mask": [1] * n + [0] * (4 - n), "labels": n}
        for n in (3, 1, 2, 1)
    ]
    found = batches(rows, 2)
    assert [batch["input_ids"].shape[1] for batch in found] == [1, 3]
    assert torch.cat([batch["labels"] for batch in found]).tolist() == [1, 1, 2, 3]


def test_scores_of_a_sure_prediction_are_zero() -> None:
    sure = Found(torch.tensor([[0.0, -60.0], [-60.0, 0.0]]), torch.tensor([0.0, 0.1]))
    unsure = Found(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.3]))
    found = scores({"test": sure, "other": unsure}, torch.tensor([0, 1]))
    assert (found["accuracy"], found["nll"], found["aurc"]) == (1, 0, 0)
    assert found["auroc"]["other"] == {"total": 1, "epistemic": 1}


@pytest.mark.parametrize(("report", "expected"), [(4.0, [0.5, 0.5]), ([4.0, 100.0], [0.5, 0.1])])
def test_a_fitted_prior_is_read_for_each_parameter(report, expected) -> None:
    diagnostics = {"laplace": [{"prior_precision": report}]}
    posterior = SimpleNamespace(config=SimpleNamespace(parameters=[("a", [2]), ("b.c", [1])], diagnostics=diagnostics))
    assert fitted_prior(posterior) == {"a": expected[0], r"b\.c": expected[1]}
