"""The temperature of a mixture, fitted on held-out rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.metrics.calibration import NUM_GROUPS, Calibration, GroupSums, fit_calibration
from hf_bayes.uncertainty.mixture_temperature import nll_at_temperatures


def predictions(true: float, count: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [n, 4] that are calibrated at temperature ``true``, and labels [n]."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(count, 4, dtype=torch.float64, generator=generator)).log_softmax(-1)
    labels = torch.multinomial((log_probs / true).softmax(-1), 1, generator=generator)[:, 0]
    return log_probs, labels


def fitted(log_probs: Tensor, labels: Tensor, groups: Tensor | None = None) -> Calibration:
    sums = GroupSums.empty()
    groups = torch.arange(len(labels)) % NUM_GROUPS if groups is None else groups
    sums.add(nll_at_temperatures(log_probs, labels), groups)
    return fit_calibration(sums, num_members=4, prediction="members")


@pytest.mark.parametrize("true", [0.4, 0.7, 1.6])
def test_the_temperature_of_the_labels_is_found(true: float) -> None:
    found = fitted(*predictions(true))
    assert abs(math.log(found.temperature / true)) < 4 * found.log_std_error + 0.01  # the prior's pull is below .01
    assert 0.005 < found.log_std_error < 0.06


def test_the_minimum_is_that_of_a_fine_grid() -> None:
    log_probs, labels = predictions(0.6)
    grid = torch.linspace(0.5, 0.75, 501, dtype=torch.float64)
    nll = torch.stack([torch.nn.functional.cross_entropy(log_probs / t, labels, reduction="sum") for t in grid])
    best = grid[(nll + 0.5 * (grid.log() / 0.5) ** 2).argmin()]
    assert fitted(log_probs, labels).temperature == pytest.approx(float(best), abs=5e-4)  # the grid's step


def test_the_standard_error_is_the_spread_over_data_sets() -> None:
    found = [fitted(*predictions(0.6, 500, seed)) for seed in range(40)]
    spread = torch.tensor([math.log(one.temperature) for one in found]).std()
    mean = torch.tensor([one.log_std_error for one in found]).mean()
    assert (
        0.6 < mean / spread < 1.6
    )  # the spread of 40 has a relative error of 11 %, a jackknife of 10 groups one of 24 %


def test_calibrated_predictions_stay_as_they_are() -> None:
    found = [fitted(*predictions(1.0, 300, seed)) for seed in range(40)]
    # a true gain of 0 minus what the fit costs is above one standard error with a probability well below .1
    assert sum(one.temperature == 1 for one in found) >= 36
    assert sum(one.calibrated_nll >= one.nll for one in found) < 36  # without the standard error


def test_the_gain_is_judged_on_rows_that_did_not_fit_it() -> None:
    log_probs, labels = predictions(1.0, 60, seed=3)
    found = fitted(log_probs, labels)
    best = min(
        float(torch.nn.functional.cross_entropy(log_probs / t, labels)) for t in torch.linspace(0.3, 3, 300).tolist()
    )
    assert found.nll == pytest.approx(float(torch.nn.functional.nll_loss(log_probs, labels)))
    assert found.calibrated_nll > best + 1e-4  # on its own rows the fit looks better than it is


def test_groups_of_equal_rows_widen_the_standard_error() -> None:
    log_probs, labels = predictions(0.6, 100)
    copies = log_probs.repeat_interleave(20, 0), labels.repeat_interleave(20, 0)
    apart = fitted(*copies)
    together = fitted(*copies, (torch.arange(100) % NUM_GROUPS).repeat_interleave(20))
    assert together.nll_std_error > 2 * apart.nll_std_error  # sqrt(20) = 4.5 without the noise of ten groups


def test_rows_that_are_all_right_do_not_make_certainty() -> None:
    log_probs, _ = predictions(1.0, 60)
    assert fitted(log_probs, log_probs.argmax(-1)).temperature > 0.2


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 50 labels, got 49: give more rows"):
        fitted(*predictions(0.6, 49))


@pytest.mark.parametrize(("label", "value"), [(1, "inf"), (3, "nan")])
def test_an_nll_that_is_not_finite_is_refused(label: int, value: str) -> None:
    log_probs = torch.tensor([[0.0, -math.inf, -2.0, -1.0]]).log_softmax(-1).repeat(60, 1)
    labels = torch.zeros(60, dtype=torch.long)
    log_probs[0, 3] = math.nan if value == "nan" else log_probs[0, 3]
    labels[0] = label
    with pytest.raises(ValueError, match=f"needs a finite NLL of the held-out rows, got {value}: a label has"):
        fitted(log_probs, labels)


def test_sums_of_parts_are_the_sums_of_all() -> None:
    log_probs, labels = predictions(0.6, 200)
    groups = torch.arange(200) % NUM_GROUPS
    values = nll_at_temperatures(log_probs, labels)
    parts, whole = GroupSums.empty(), GroupSums.empty()
    whole.add(values, groups)
    for part in (slice(0, 70), slice(70, 200)):
        parts.add(values[part], groups[part])
    torch.testing.assert_close(parts.curves, whole.curves)
    assert torch.equal(parts.terms, whole.terms)
