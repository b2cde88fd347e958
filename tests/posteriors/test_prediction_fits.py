"""Fits to predictions are dropped when these predictions change, and stay otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_bayes.distributions.approximations import Draws
from hf_bayes.posteriors.custom_generate import as_draws
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_approximation, with_layer_factors, with_temperature, without_fits
from tests.faults import posteriors
from tests.posteriors.test_abstention import RULE
from tests.posteriors.test_config import CALIBRATED
from tests.posteriors.test_student import DESCRIPTION, tensors

FITS = ("student", "calibration", "layer_factors", "abstention")
PASS: dict[str, Any] = {"prediction": "single_pass", "num_members": 0}
MEMBERS: dict[str, Any] = {"prediction": "members", "num_members": 10}


def fitted(of: dict[str, Any], *, temperature: float = 1.3, rule: dict[str, Any] | None = None) -> Posterior:
    """Return a Gaussian posterior with all fits, to one way of prediction.

    Args:
        rule: what differs in the threshold.
    """
    plain = posteriors.gaussian()
    stored = {
        "student": DESCRIPTION | of | {"posterior": plain.fingerprint},
        "calibration": CALIBRATED | of | {"temperature": temperature},
        "layer_factors": {"head": 2.0},
        "abstention": RULE.to_dict() | of | {"temperature": temperature} | (rule or {}),
    }
    return dataclasses.replace(plain, student=tensors(), config=dataclasses.replace(plain.config, **stored))


def kept(posterior: Posterior) -> set[str]:
    assert (posterior.student is None) == (not posterior.config.student)
    return {name for name in FITS if getattr(posterior.config, name)}


@pytest.mark.parametrize(("of", "expected"), [(PASS, {"layer_factors"}), (MEMBERS, set(FITS))])
def test_new_factors_leave_out_what_was_fitted_to_the_pass(of: dict[str, Any], expected: set[str]) -> None:
    found = with_layer_factors(fitted(of), {"head": 3.0})
    assert kept(found) == expected
    assert found.config.layer_factors == {"head": 3.0}


def test_fits_to_named_predictions_are_left_out() -> None:
    assert kept(without_fits(fitted(MEMBERS), ("members",))) == {"layer_factors"}
    assert kept(without_fits(fitted(MEMBERS), ("linearised", "single_pass"))) == set(FITS) - {"layer_factors"}


@pytest.mark.parametrize("rule", [{}, {"num_members": None}])
def test_other_draws_have_no_fit_and_no_figures(rule: dict[str, Any]) -> None:
    posterior = dataclasses.replace(fitted(MEMBERS, rule=rule), trace={"risk": {"limit": 1.0}, "accept": [1.0]})
    draws = Draws(posteriors.theta(2, posteriors.PLAIN), torch.tensor([0, 3]))
    found = with_approximation(posterior, draws, method={"name": "other"})
    assert kept(found) == set()
    assert (found.config.metrics, found.trace) == ({}, {"accept": [1.0]})
    assert (found.config.num_members, found.config.member_chains) == (2, [0, 3])
    assert (found.config.method, found.config.approximation) == ({"name": "other"}, "draws")


@pytest.mark.parametrize(
    ("before", "after", "rule", "stays"),
    [
        (MEMBERS, MEMBERS | {"temperature": 1.5}, {}, False),
        (MEMBERS, MEMBERS | {"temperature": 1.3}, {}, True),
        (MEMBERS, PASS | {"temperature": 1.3}, {}, False),  # members are at 1 from now on
        (MEMBERS, MEMBERS | {"temperature": 1.5}, {"num_members": 3, "temperature": 1.0}, True),
        (MEMBERS, MEMBERS | {"temperature": 1.5}, {"num_members": None}, False),
        (MEMBERS, MEMBERS | {"temperature": 1.3}, {"num_members": None}, True),
    ],
)
def test_a_threshold_stays_at_its_own_temperature(
    before: dict[str, Any], after: dict[str, Any], rule: dict[str, Any], stays: bool
) -> None:
    found = with_temperature(fitted(before, rule=rule), CALIBRATED | after)
    assert found.config.calibration == CALIBRATED | after
    assert kept(found) == set(FITS) - (set() if stays else {"abstention"})


STUDENT: dict[str, Any] = {"prediction": "distilled", "num_members": 0}


def test_a_threshold_of_a_student_goes_with_it() -> None:
    assert kept(without_fits(fitted(MEMBERS, rule=STUDENT), ("distilled",))) == set(FITS) - {"abstention"}
    assert kept(without_fits(fitted(MEMBERS, rule=STUDENT), ("members",))) == {"layer_factors"}
    assert kept(without_fits(fitted(MEMBERS, rule=STUDENT), ("linearised",))) == set(FITS)


def test_draws_of_an_export_have_no_threshold_of_a_student() -> None:
    assert kept(as_draws(fitted(MEMBERS, rule=STUDENT), 10)) == {"calibration"}
    assert kept(as_draws(fitted(MEMBERS), 10)) == {"calibration", "abstention"}


@pytest.mark.parametrize(("temperature", "stays"), [(1.3, True), (1.5, False)])
def test_a_student_has_the_temperature_that_it_imitates(temperature: float, stays: bool) -> None:
    found = with_temperature(fitted(MEMBERS, rule=STUDENT), CALIBRATED | MEMBERS | {"temperature": temperature})
    assert ("abstention" in kept(found)) is stays


def test_a_temperature_of_1_keeps_a_threshold_of_unknown_origin() -> None:
    posterior = fitted(MEMBERS, temperature=1.0, rule={"num_members": None})
    assert "abstention" in kept(with_temperature(posterior, CALIBRATED | PASS | {"temperature": 1.0}))
