from __future__ import annotations

import dataclasses

from tests.diagnostics.good_run import GOOD


def test_a_small_kinetic_error_is_not_reported_at_any_size() -> None:
    warm = [1.05 * 2 / 1.9] * 4
    assert dataclasses.replace(GOOD, dim=1_000_000, kinetic_temperature=warm).verdict == "converged"
    # with ten coordinates even twice the expected temperature is within chance
    assert dataclasses.replace(GOOD, dim=10, kinetic_temperature=[2.0] * 4).verdict == "converged"


def test_tensor_and_position_temperatures_may_vary_by_chance() -> None:
    for outside, expected in ((3, "converged"), (5, "the kinetic temperature of 5 of 80")):  # P: 4.7 %, 0.1 %
        share = [1 - outside / 20, 1.0, 1.0, 1.0]
        found = dataclasses.replace(GOOD, kinetic_share=share, num_tensors=20).verdict
        assert found.startswith(expected)
    for change in (
        {"configurational_temperature": [1.9] * 4},
        {"configurational_temperature": [1.0, 1.0, 1.0, 30.0]},  # one chain out of four does not determine the mean
        {"configurational_temperature": [0.2] * 4, "dim": 3, "kinetic_temperature": None},
    ):
        assert dataclasses.replace(GOOD, temperature=1.0, **change).verdict == "converged"


def test_heat_where_the_data_rule_counts_beyond_what_was_allowed() -> None:
    informed = {"kinetic_temperature_law": 1.0, "heating": 0.1}
    assert dataclasses.replace(GOOD, **informed, kinetic_temperature_informed=[1.37] * 4).verdict == "converged"
    verdict = dataclasses.replace(GOOD, **informed, kinetic_temperature_informed=[1.38, 1.1, 1.1, 1.1]).verdict
    assert verdict.startswith(
        "kinetic temperature 1.38 where the data outweigh the prior, but at most 1.1 is allowed (1 of 4 chains): "
        "their epistemic uncertainty is too large by about as much"
    )


def test_allowed_heat_is_no_fault_if_predictions_chose_it() -> None:
    warm = dataclasses.replace(GOOD, dim=1_000_000, kinetic_temperature_law=0.3, kinetic_temperature=[0.41] * 4)
    chosen = dataclasses.replace(warm, heating=0.4, chosen_temperature=0.285)
    assert chosen.verdict == "converged"
    for hot in (dataclasses.replace(chosen, heating=0.36), dataclasses.replace(chosen, chosen_temperature=None)):
        assert "kinetic temperature 0.41 where 0.3 is expected (4 of 4 chains): gradient noise" in hot.verdict


def test_cold_chains_under_a_ramp_are_told_to_shorten_it() -> None:
    cold = dataclasses.replace(GOOD, kinetic_temperature=[0.5] * 4, ramped=True)
    cold = dataclasses.replace(cold, temperature=1.0, configurational_temperature=[0.3] * 4)
    kinetic, configurational = cold.verdict.split("; ")
    assert kinetic.endswith("lag behind the temperature's ramp: shorter ramp_up or longer cycles")
    assert "shorter ramp_up, longer cycles" in configurational


def test_two_mirrored_chains_are_one_observation() -> None:
    share = [1 - 3 / 20, 1 - 3 / 20, 1.0, 1.0]  # the same momenta twice: 3 of 40 tensors by chance have P = 0.7 %
    found = dataclasses.replace(GOOD, kinetic_share=share, num_tensors=20)
    assert found.verdict.startswith("the kinetic temperature of 6 of 80")  # the broken twin: four chains
    assert dataclasses.replace(found, mirrored=True).verdict == "converged"
    pairs = [3.0, 3.0, 2.1, 2.1]  # 1.55 from 1: 6 standard errors of four values, 3.4 of two
    found = dataclasses.replace(GOOD, temperature=1.0, configurational_temperature=pairs)
    assert found.verdict.startswith("configurational temperature 2.55")
    assert dataclasses.replace(found, mirrored=True).verdict == "converged"
