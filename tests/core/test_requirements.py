"""The requirements of methods, and the record that holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import EnergyLimits, Requirements, need_of_gradient_variance
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Requirements().min_batches = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", METHODS)
def test_requirements_are_no_field_of_the_saved_config(name: str) -> None:
    config = METHODS[name]()
    assert isinstance(config.requirements, Requirements)
    assert "requirements" not in config.to_dict()


def overridden(kind: type[MethodConfig]) -> set[str]:
    """Return the names of ``MethodConfig`` that a child has defined anew, beside its fields."""
    own = {name for parent in kind.__mro__[: kind.__mro__.index(MethodConfig)] for name in vars(parent)}
    fields = {field.name for field in dataclasses.fields(MethodConfig)}
    return {name for name in own & set(vars(MethodConfig)) if not name.startswith("__")} - fields


@pytest.mark.parametrize("name", METHODS)
def test_methods_override_requirements_and_build_alone(name: str) -> None:
    assert overridden(METHODS[name]) <= {"requirements", "build"}


def test_a_hook_of_one_method_would_be_noticed() -> None:
    class Broken(METHODS["ekf"]):  # type: ignore[misc, name-defined]
        def to_dict(self) -> dict[str, Any]:
            return {}

    assert "to_dict" in overridden(Broken)


def test_an_energy_is_refused_by_a_setting_or_by_its_size() -> None:
    EnergyLimits().check(10**9)
    EnergyLimits(max_hessian=3, remedy="fewer").check(3)
    with pytest.raises(ValueError, match=r"backward pass for each of 4 elements; the limit is 3: fewer"):
        EnergyLimits(max_hessian=3, remedy="fewer").check(4)
    with pytest.raises(ValueError, match="needs rows"):
        EnergyLimits(refusal="needs rows").check(1)


def test_an_unset_measurement_is_made_where_it_is_cheap() -> None:
    assert [need_of_gradient_variance(measure) for measure in (True, None, False)] == ["needed", "useful", "none"]


def test_a_correction_needs_a_gradient_variance() -> None:
    config = SGHMCConfig(correct_gradient_noise=True, measure_gradient_noise=False)
    assert config.requirements.gradient_variance == "needed"
    assert SGHMCConfig(measure_gradient_noise=False).requirements.gradient_variance == "none"


def test_a_prior_for_each_tensor_needs_two_heldout_halves() -> None:
    scopes = {"model": "whole", "tensor": "split", "element": "split"}
    for scope, heldout in scopes.items():
        requirements = LaplaceConfig(fit_prior="heldout", prior_scope=scope).requirements
        assert (requirements.heldout, requirements.all_chains_in_one_pass) == (heldout, True)
        assert LaplaceConfig(prior_scope=scope).requirements.heldout == "none"


@pytest.mark.parametrize("fit_prior", [None, "evidence", "heldout"])
def test_a_fitted_prior_is_in_the_record(fit_prior: str | None) -> None:
    assert LaplaceConfig(fit_prior=fit_prior).requirements.fits_prior == (fit_prior is not None)


def test_heating_is_allowed_for_samplers_alone() -> None:
    for heating in (None, 0.2):
        sampler = SGHMCConfig(heating=heating)
        assert sampler.requirements.allowed_heating == sampler.allowed_heating > 0
    assert METHODS["mean_field"]().requirements.allowed_heating == 0


def test_a_child_replaces_only_its_own_requirements() -> None:
    parent, child = METHODS["map"]().requirements, MCDropoutConfig().requirements
    assert dataclasses.replace(parent, ends_at_map=False, drops_inputs=True) == child


def test_a_leapfrog_proposal_needs_batches_of_its_own() -> None:
    assert PenaltyConfig().requirements.min_batches == 2
    assert PenaltyConfig(num_leapfrog=1, proposal_batches=3).requirements.min_batches == 5
    assert PenaltyConfig(replacement=False).requirements.batch_order == "disjoint"
